"""Triton in a folder of its own, for tests where there is no GPU: with it in the environment itself, torch.compile would use it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro import paths

FOLDER = paths.root() / ".triton"
TRITON = importlib.util.find_spec("triton") is not None
with_folder = pytest.mark.skipif(not (FOLDER / ".ready").exists(), reason="make triton")


def pytest_with_triton(file: Path, choice: str, cache: Path, **environment: str) -> None:
    """The tests of `file` that `choice` names must pass in a process that sees the folder."""
    found = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", choice, str(file)],
        cwd=paths.root(),
        env=os.environ | environment | {"PYTHONPATH": found, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "passed" in done.stdout and "skipped" not in done.stdout, done.stdout + done.stderr
