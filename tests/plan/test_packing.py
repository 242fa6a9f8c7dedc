"""Which points share a job: every point in exactly one, within what the queue allows."""

import itertools
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.experiments.base import Shape
from repro.plan import packing
from repro.plan.config import Bin, ConfigError, Node, Slurm

ROWS = [Bin(nodes=8, hours=6), Bin(nodes=2, hours=2)]


def slurm(**changes):
    settings = {"environment": "-", "cores_per_rank": 1, "bins": ROWS, "running_jobs": 2, "pack_minutes": 60}
    return Slurm(**settings | {"start_minutes": 0} | changes)


def step(number, minutes, nodes=1, experiment="e", attempt=1):
    return SimpleNamespace(experiment=experiment, record=f"r{number}", nodes=nodes, minutes=minutes, attempt=attempt)


STEPS = st.lists(st.tuples(st.floats(0.1, 100), st.integers(1, 8), st.sampled_from("ab")), max_size=40)


@given(STEPS, st.floats(1, 200), st.floats(0, 5))
def test_every_point_is_in_one_job_that_the_queue_allows(sizes, pack_minutes, start):
    settings = slurm(pack_minutes=pack_minutes, start_minutes=start)
    steps = [step(n, minutes, nodes, kind) for n, (minutes, nodes, kind) in enumerate(sizes)]
    known = {s.record: s for s in steps}
    jobs = packing.pack(steps, settings)
    assert sorted(name for job in jobs for name in job.jobs) == sorted(known)
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        inside = [known[name] for name in job.jobs]
        assert {(s.experiment, s.nodes) for s in inside} == {(job.experiment, job.nodes)}
        expected = sum(s.minutes + start for s in inside)
        assert expected <= job.minutes <= 60 * settings.limit_hours(job.nodes)
        assert len(inside) == 1 or expected <= pack_minutes
        assert math.isclose(job.node_hours, job.nodes * expected / 60, abs_tol=0.01 * job.nodes)


@given(STEPS)
def test_neighbours_in_order_are_not_split_without_need(sizes):
    """Two jobs of the same kind that follow each other would not fit one."""
    steps = [step(n, minutes, nodes) for n, (minutes, nodes, _) in enumerate(sizes)]
    known = {s.record: s for s in steps}
    jobs = packing.pack(steps, slurm())
    for one, two in itertools.pairwise(jobs):
        if one.nodes == two.nodes:
            assert one.expected + known[two.jobs[0]].minutes > 60 - 0.01


def test_a_new_attempt_is_another_job():
    first, second = (packing.pack([step(0, 1, attempt=n)], slurm())[0].name for n in (1, 2))
    assert first != second


def test_what_the_queue_does_not_allow_is_an_error():
    with pytest.raises(
        ConfigError, match=r"9 nodes and 3 minutes, which r0 needs; allowed: 1-2 nodes, 2 h; 3-8 nodes, 6 h"
    ):
        packing.pack([step(0, 1, nodes=9)], slurm())
    with pytest.raises(ConfigError, match="1 nodes and 121 minutes"):  # and a job needs some to begin and to end
        packing.pack([step(0, 119)], slurm())


def test_rows_of_the_queue():
    jobs = packing.pack([step(0, 30, nodes=2), step(1, 118, nodes=1), step(2, 200, nodes=3)], slurm())
    assert [job.bin for job in jobs] == ["1-2 nodes, 2 h", "1-2 nodes, 2 h", "3-8 nodes, 6 h"]
    assert [job.minutes for job in jobs] == [47, 120, 302]
    assert packing.pack([step(0, 30, nodes=2)], slurm(begin_minutes=3))[0].minutes == 50
    with pytest.raises(ConfigError, match="1 nodes and 121 minutes"):
        packing.pack([step(0, 116)], slurm(begin_minutes=3))


def test_hours_until_all_have_run():
    jobs = packing.pack([step(n, 60) for n in range(3)], slurm(pack_minutes=1))
    assert packing.wall_hours(jobs, 1) == 3
    assert packing.wall_hours(jobs, 2) == 2
    assert packing.wall_hours([], 2) == 0


@pytest.mark.parametrize(
    ("shape", "one_machine", "node", "reason"),
    [
        (Shape(2, 4, 2), False, Node(packages=4, gcds=2), None),
        (Shape(2, 1, 4), False, Node(packages=4, gcds=2), "4 ranks in a package, and a package has 2"),
        (Shape(1, 4, 1), False, Node(packages=1, gcds=4), "4 packages in a node, and a node has 1"),
        (Shape(2, 1, 1), True, Node(packages=1, gcds=4), "memory that all ranks see, and there are several nodes"),
        (Shape(2, 1, 1), True, Node(packages=1, gcds=4, emulated=True), None),
    ],
)
def test_points_that_nodes_cannot_hold(shape, one_machine, node, reason):
    assert packing.unfit(shape, one_machine, node) == reason
