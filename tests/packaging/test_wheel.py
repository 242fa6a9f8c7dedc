"""The wheel, in an environment that holds nothing else: what a user of one engine gets."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from repro import paths

PROGRAM = Path(__file__).with_name("outside.py")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "REPRO_ROOT")}
    found = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_engine_works_outside_any_checkout_with_its_extra_alone(tmp_path):
    """About two minutes: it downloads torch and installs it."""
    root, source = paths.root(), tmp_path / "source"
    shutil.copytree(root / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("repro_papers-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    pip = (python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", root / "constraints.txt")
    run(*pip, "torch==2.13.0", wheel, cwd=tmp_path)
    run(python, PROGRAM, "base", cwd=tmp_path)
    run(*pip, f"{wheel}[scaling]", cwd=tmp_path)
    run(python, PROGRAM, "engines", cwd=tmp_path)
