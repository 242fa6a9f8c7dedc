"""A box for a whole file of tests, and what asks it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from repro import box
from repro.box import boxes, packages
from repro.emulate import netns

_boxes: list[boxes.OwnedBox] = []  # of this file's tests, whatever checkout a test plays in
SNAKEMAKE = Path(__file__).parent / "slurm/snakemake_fast.py"


def lacking(accounting: bool = False) -> str | None:
    """Why there can be no box here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    if missing := packages.missing(accounting):
        return f"needs {', '.join(missing)}"
    return netns.unavailable()


@contextlib.contextmanager
def boxed(**settings):
    """A box while the block runs, with the commands of Slurm asking it."""
    if reason := lacking():
        pytest.skip(reason)
    box.up(box.Settings(**settings))
    _boxes.append(boxes.mine())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(own().configuration))
            yield
    finally:
        box.down()
        _boxes.pop()


def own() -> boxes.OwnedBox:
    """The box that `boxed` has started."""
    return _boxes[-1]


def slurm(*command: str, timeout: float = 60) -> str:
    """Standard output of a command of Slurm."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
