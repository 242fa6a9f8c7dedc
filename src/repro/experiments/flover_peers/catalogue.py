"""Which engines there are, and how each is started: script, variant, interpreter and environment."""

import ctypes.util
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from repro import paths
from repro.records import provenance

SCRIPTS = Path(__file__).parent / "engines"
TCMALLOC = "tcmalloc_minimal"


def environment_of_peers() -> Path:
    """Made by `make peers`."""
    return paths.root() / ".peers"


@dataclass(frozen=True)
class Engine:
    """`script`: in the folder `engines`; `peers`: runs in the peers' environment, otherwise in this package's."""

    name: str
    script: str
    variant: str = ""
    peers: bool = False

    @property
    def python(self) -> str:
        return str(environment_of_peers() / "bin" / "python") if self.peers else sys.executable

    def missing(self) -> str:
        """What is needed to run it and not there, with the command that brings it; empty when all is."""
        if not importlib.util.find_spec("transformers"):
            return "needs transformers, which `make environment` installs"
        if not self.peers:
            return ""
        if not (environment_of_peers() / ".ready").exists():
            return f"{self.name} needs other servers' software: `make peers`"
        if self.name.startswith("vllm") and not ctypes.util.find_library(TCMALLOC):
            return f"{self.name} needs lib{TCMALLOC}: `apt-get install libtcmalloc-minimal4`"
        if "zentorch" in self.name and "AMD" not in provenance.cpu_model():
            return f"{self.name} needs an AMD processor, this is {provenance.cpu_model()}"
        return ""

    def environment(self, cores: Sequence[int], cache: Path) -> dict[str, str]:
        """Variables of its process, on these cores. `cache`: folder for what it compiles."""
        ours = ("PYTHONPATH", "LD_PRELOAD") if self.peers else ("LD_PRELOAD",)
        found = {name: value for name, value in os.environ.items() if name not in ours}
        found |= {"OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1"}
        if self.peers and self.name.startswith("vllm"):
            found |= self._vllm(cores, cache)
        return found

    def _vllm(self, cores: Sequence[int], cache: Path) -> dict[str, str]:
        """As its documentation advises for the CPU: one OpenMP thread bound to each core, tcmalloc and Intel's OpenMP
        loaded first. In process: with its own processes, the scheduler would take turns with the model on the same
        cores."""
        preload = [ctypes.util.find_library(TCMALLOC), *environment_of_peers().glob("lib/libiomp5.so")]
        chosen = {
            "LD_PRELOAD": ":".join(str(library) for library in preload),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB: more than 32 of the longest requests on the largest model
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if "zentorch" in self.name:
            chosen["PYTHONPATH"] = str(environment_of_peers() / "zentorch")
        return chosen


_ALL = (
    Engine("fused", "ours.py", "fused"),
    Engine("serial", "ours.py", "serial"),
    # Inductor pays on some processors and models and not on others, so vLLM is measured both ways.
    Engine("vllm_compiled", "vllm_cpu.py", "compiled", peers=True),
    Engine("vllm_eager", "vllm_cpu.py", "eager", peers=True),
    Engine("vllm_zentorch_compiled", "vllm_cpu.py", "compiled", peers=True),
    Engine("vllm_zentorch_eager", "vllm_cpu.py", "eager", peers=True),
    Engine("transformers_continuous", "transformers_continuous.py"),
    Engine("transformers_static", "transformers_static.py"),
    Engine("llama_cpp", "llama_cpp_batch.py", peers=True),
)
ENGINES = {engine.name: engine for engine in _ALL}
