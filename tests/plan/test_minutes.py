"""The minutes that `repro plan` expects are those that shipped runs took, and what README and Makefile promise."""

import json
import re

import pytest

from repro import paths
from repro.plan import jobs as plan

RUNS = [json.loads(path.read_text()) for path in sorted((paths.root() / "results/reference").glob("*/run-*.json"))]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["tier"])
def test_the_plan_is_within_a_fifth_of_a_run(run):
    planned = plan.minutes_of(plan.make(run["tier"]).jobs, run["cores"])
    assert planned == pytest.approx(run["minutes"], rel=0.2)


def test_readme_and_makefile_promise_the_same():
    root = paths.root()
    said = re.search(
        r"points: (\d+) minutes on 2 cores, (\d+) for make smoke", (root / "Makefile").read_text()
    ).groups()
    text = (root / "README.md").read_text()
    assert f"then {said[0]} minutes of runs on 2 cores" in text and f"every experiment: {said[1]} minutes" in text
