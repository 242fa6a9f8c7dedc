"""The packages that install alone import torch, numpy, numba and the standard library, and nothing else."""

import json
import subprocess
import sys

MODULES = (
    *("topology", "comm", "comm.row_exchange", "quantize"),
    *("zero", "zero.checkpoint", "zero.plan_search", "zero.memory", "zero.traffic"),
)
SCRIPT = """
import importlib, json, sys
import numba, numpy, torch, torch.distributed.checkpoint, torch.distributed.fsdp  # what these bring along is theirs

ALLOWED = {"numba", "numpy", "torch", "llvmlite", "triton", "repro", *sys.stdlib_module_names}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"refused: {name}", name=name)

for name in list(sys.modules):
    if name.partition(".")[0] not in ALLOWED and hasattr(sys.modules[name], "__path__"):
        del sys.modules[name]  # torch or numba found it; our own import of it must be seen
sys.meta_path.insert(0, Refuse())
refused = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(f"repro.{name}")
    except ImportError as error:
        refused[name] = str(error)
print(json.dumps(refused))
"""


def test_the_lone_packages_import_nothing_else():
    run = subprocess.run([sys.executable, "-c", SCRIPT, *MODULES, "scaling"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    refused = json.loads(run.stdout)
    assert refused.pop("scaling").startswith("repro.scaling needs "), "the test must see an import that is not allowed"
    assert not refused
