"""The minutes that README and `repro plan` promise are those that the shipped run took."""

import json
import re

import pytest

from repro import paths
from repro.plan import jobs as plan

RUNS = [json.loads(path.read_text()) for path in sorted((paths.root() / "results/reference").glob("*/run-*.json"))]
LIMITS = {"smoke": 3, "laptop": 12}  # minutes on two cores


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run["tier"])
def test_the_plan_is_within_a_fifth_of_a_run(run):
    planned = plan.minutes_of(plan.make(run["tier"]).jobs, run["cores"])
    assert planned == pytest.approx(run["minutes"], rel=0.2)


def test_runs_of_the_quick_tiers_are_shipped_and_short_enough():
    assert {run["tier"]: run["minutes"] <= LIMITS[run["tier"]] for run in RUNS} == dict.fromkeys(LIMITS, True)


def test_make_says_the_same():
    text = (paths.root() / "Makefile").read_text()
    laptop, smoke = re.search(r"points: (\d+) minutes on 2 cores, (\d+) for make smoke", text).groups()
    assert {"laptop": int(laptop), "smoke": int(smoke)} == LIMITS
