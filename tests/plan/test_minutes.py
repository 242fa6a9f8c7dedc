"""Minutes that the plan expects, from which README and Makefile have theirs."""

from datetime import timedelta
from pathlib import Path

import pytest

from repro import paths
from repro.plan import jobs as plan
from repro.records import record

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize("tier", ["smoke", "laptop"])
def test_the_plan_expects_what_the_shipped_run_took(tier):
    points = plan.minutes_of(plan.make(tier).jobs, cores=2) - plan._READ_MINUTES
    assert points == pytest.approx(taken(tier), rel=0.2)


def taken(tier: str) -> float:
    """Minutes from the first shipped point of a tier to the last, in the call that made most of them. A pause of a
    minute lies between two calls."""
    found = plan.make(tier)
    folder = paths.root() / found.reference / "records"
    runs = [record.read(folder / job.experiment / Path(job.record).name).provenance for job in found.jobs]
    calls: list[list] = []
    for run in sorted(runs, key=lambda run: run.start):
        if not calls or run.start - max(one.end for one in calls[-1]) > MINUTE:
            calls.append([])
        calls[-1].append(run)
    most = max(calls, key=len)
    if len(most) < 0.9 * len(runs):
        pytest.skip(f"the shipped records of tier {tier} are of several calls, which do not tell what one takes")
    return (max(run.end for run in most) - most[0].start) / MINUTE
