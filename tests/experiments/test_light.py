"""Points, metrics and the plan are there without any engine."""

import json
import subprocess
import sys

import pytest

from repro.plan import config

HEAVY = ("torch", "numpy", "numba", "scipy", "highspy", "pandas", "matplotlib")
PLATFORMS = [name for name in config.platforms() if config.load(platform=name)[1].hardware is None]


def loaded(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has after `code`."""
    asked = f"{code}\nimport sys, json\nsys.stderr.write(json.dumps([name for name in {HEAVY} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr))


def test_experiments_are_described_without_an_engine():
    assert not loaded(
        "from repro import experiments\nfor name in experiments.names(): experiments.get(name).parameters()"
    )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_plan_of_a_platform_loads_no_engine(platform):
    """Where a platform names its hardware, the scaling model predicts minutes, and that takes torch and scipy. Where there
    are finished records, pyarrow checks their series, and takes numpy."""
    command = ["plan", "--platform", platform, "--json"]
    assert loaded(f"from repro import cli\ncli.app({command}, standalone_mode=False)") <= {"numpy"}


def test_help_loads_no_engine():
    assert not loaded("from repro import cli\ntry: cli.app(['--help'])\nexcept SystemExit: pass")
