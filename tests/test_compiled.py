"""What numba compiles is kept where a folder can be written, and works where none can."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import repro
from repro.compiled import compiled

PACKAGE = Path(repro.__file__).parent
COMPILED = sorted(
    str(path.relative_to(PACKAGE.parent).with_suffix("")).replace("/", ".")
    for path in PACKAGE.rglob("*.py")
    if re.search("^from repro.compiled import", path.read_text(), re.MULTILINE)
)
SCRIPT = """
import importlib, sys
import numpy as np

for name in sys.argv[1:]:
    importlib.import_module(name)
from repro.exflow import paper
counts = np.zeros((3, 3), np.int64)
paper.count_transitions(np.array([[2]]), np.array([[1]]), counts)
print(paper.__file__, counts.tolist())
"""


@pytest.fixture
def unwritable(tmp_path):
    """A copy of the package, and the environment of a process, in which numba can write nowhere. Root may write
    anywhere, but makes no folder where there is a file."""
    shutil.copytree(PACKAGE, tmp_path / "repro", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [tmp_path / "repro", *(tmp_path / "repro").rglob("*/")]:
        (folder / "__pycache__").touch()
    nowhere = str(Path(__file__) / "below")
    return os.environ | {"PYTHONPATH": str(tmp_path), "HOME": nowhere, "XDG_CACHE_HOME": nowhere}


def run(environment):
    done = subprocess.run([sys.executable, "-c", SCRIPT, *COMPILED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_modules_can_be_imported_and_used_where_no_folder_can_be_written(unwritable, tmp_path):
    assert "repro.quantize.cpu" in COMPILED and len(COMPILED) > 5
    unwritable.pop("NUMBA_CACHE_DIR", None)
    assert run(unwritable) == f"{tmp_path}/repro/exflow/paper.py [[0, 0, 0], [0, 0, 0], [0, 1, 0]]\n"
    assert not list(tmp_path.rglob("*.nbi"))


def test_the_folder_that_numba_is_given_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @compiled(error_model="numpy")
    def inverse(x):
        return 1 / x

    assert inverse(0.0) == np.inf
    assert list(tmp_path.rglob("*.nbi"))


def test_other_errors_of_numba_are_not_hidden(monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "none.such")
    with pytest.raises(RuntimeError, match=r"none\.such"):
        compiled()(lambda x: x)


def test_nothing_else_asks_numba_for_its_cache():
    found = {path.name for path in PACKAGE.rglob("*.py") if "cache=True" in path.read_text()}
    assert found == {"compiled.py"}
