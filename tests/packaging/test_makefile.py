"""The Makefile's environment, with a stand-in for Python that installs nothing."""

import os
import shutil
import subprocess

import pytest

from repro import paths

# `python -m venv .venv` puts this script itself there; all else that is asked of it succeeds.
PYTHON = """#!/bin/sh
[ "$2" != venv ] || { mkdir -p .venv/bin && cp "$0" .venv/bin/python; }
"""
CPU, CUDA = "TORCH_INDEX=https://host/cpu", "TORCH_INDEX=https://host/cu130"


@pytest.fixture
def make(tmp_path):
    """`make environment` with these words in a checkout of its own; its exit code and what it says."""
    shutil.copy(paths.root() / "Makefile", tmp_path)
    for name in ("constraints.txt", "requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)

    def call(*words):
        command = ["make", "environment", "PYTHON=./python", *words]
        path = {"PATH": os.environ["PATH"]}  # without the words of a make that runs these tests
        done = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    return call


@pytest.mark.parametrize("first", [[], [CPU]])
def test_another_index_than_the_environments_is_refused(make, tmp_path, first):
    assert make(*first) == (0, "Installing into .venv ...\n")
    assert make(*first)[0] == make()[0] == 0
    for outdated in (False, True):
        if outdated:
            (tmp_path / ".venv/.ready").unlink()  # as of an install that was interrupted
        code, said = make(CUDA)
        assert code and "rm -rf .venv first" in said and "Installing" not in said
    assert make()[0] == 0 and make(*first)[0] == 0, "it keeps its index"
    shutil.rmtree(tmp_path / ".venv")
    assert make(CUDA)[0] == 0


def test_an_environment_that_was_moved_is_refused(make, tmp_path):
    assert make()[0] == 0
    program = tmp_path / ".venv/bin/repro"
    program.write_text("#!/nowhere/.venv/bin/python\n")
    code, said = make()
    assert code and "rm -rf .venv first" in said
    program.write_text("#!/bin/sh\n")  # as where the path has a blank
    assert make()[0] == 0


def test_tests_on_the_cluster_stand_where_make_collects_them():
    """Collecting all files to run these takes half a minute."""
    marked = {
        path.parent for path in (paths.root() / "tests").rglob("test_*.py") if ".mark" + ".box" in path.read_text()
    }
    assert marked == {paths.root() / "tests/slurm"}
    assert "-m box tests/slurm\n" in (paths.root() / "Makefile").read_text()
