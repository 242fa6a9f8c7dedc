"""Which points share a job. A queue counts jobs and gives whole nodes, and a job takes long to start."""

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from pydantic import BaseModel

from repro.experiments.base import Shape
from repro.plan.config import ConfigError, Node, Slurm

SPARE = 1.5  # a job asks for so much more than its points are expected to take
LEAST_MINUTES = 5  # that a job asks for
ENDING_MINUTES = 2  # that a job needs beside its points: to start, and to say at its end why one was not done


class Step(Protocol):
    """A point to run: `record` is its name, `nodes` what it needs, `minutes` what it is expected to take."""

    experiment: str
    record: str
    nodes: int
    minutes: float
    attempt: int


class Allocation(BaseModel):
    """One Slurm job: `jobs` names the records it makes, one after the other; `minutes` is the limit it asks for,
    `expected` what its points should take, `bin` the row of the queue's rules that it falls into."""

    name: str
    experiment: str
    nodes: int
    minutes: int
    expected: float
    bin: str
    jobs: list[str]

    @property
    def node_hours(self) -> float:
        return self.nodes * self.expected / 60


def unfit(shape: Shape, one_machine: bool, node: Node) -> str | None:
    """Why a point cannot run on these nodes; None when it can."""
    if shape.gcds > node.gcds:
        return f"{shape.gcds} ranks in a package, and a package has {node.gcds}"
    if shape.packages > node.packages:
        return f"{shape.packages} packages in a node, and a node has {node.packages}"
    if one_machine and shape.nodes > 1 and not node.emulated:
        return "memory that all ranks see, and there are several nodes"
    return None


def pack(steps: Iterable[Step], slurm: Slurm) -> list[Allocation]:
    """Points of one experiment and node count, in their order, in jobs of about `pack_minutes`. ConfigError where the
    queue has no place for a point."""
    groups: dict[tuple[str, int], list[list[Step]]] = {}
    filled: dict[tuple[str, int], float] = {}
    for step in steps:
        key, minutes = (step.experiment, step.nodes), step.minutes + slurm.start_minutes
        packs = groups.setdefault(key, [])
        together = filled.get(key, math.inf) + minutes
        if together > slurm.pack_minutes or _limit(slurm, step.nodes, together) is None:
            packs.append([])
            together = minutes
        packs[-1].append(step)
        filled[key] = together
    return [_allocation(steps, slurm) for packs in groups.values() for steps in packs]


def _allocation(steps: Sequence[Step], slurm: Slurm) -> Allocation:
    first, expected = steps[0], sum(step.minutes + slurm.start_minutes for step in steps)
    minutes = _limit(slurm, first.nodes, expected)
    if minutes is None:
        raise ConfigError(
            f"slurm.bins: found no row for {first.nodes} nodes and {expected:.0f} minutes, which {first.record} needs;"
            f" allowed: {'; '.join(_row(slurm, number) for number in range(len(slurm.bins)))}"
        )
    number = next(i for i, row in enumerate(sorted(slurm.bins, key=lambda row: row.nodes)) if first.nodes <= row.nodes)
    digest = hashlib.sha256(repr([(step.record, step.attempt) for step in steps]).encode()).hexdigest()[:8]
    return Allocation(
        name=f"{first.experiment}-{first.nodes}n-{digest}",
        experiment=first.experiment,
        nodes=first.nodes,
        minutes=minutes,
        expected=round(expected, 2),
        bin=_row(slurm, number),
        jobs=[step.record for step in steps],
    )


def _limit(slurm: Slurm, nodes: int, expected: float) -> int | None:
    """Minutes to ask for; None where the queue does not give even what is expected."""
    hours = slurm.limit_hours(nodes)
    if hours is None or expected + ENDING_MINUTES > hours * 60:
        return None
    return min(int(hours * 60), max(LEAST_MINUTES, math.ceil(expected * SPARE)))


def _row(slurm: Slurm, number: int) -> str:
    rows = sorted(slurm.bins, key=lambda row: row.nodes)
    least = rows[number - 1].nodes + 1 if number else 1
    return f"{least}-{rows[number].nodes} nodes, {rows[number].hours:g} h"


def wall_hours(allocations: Iterable[Allocation], running_jobs: int) -> float:
    """Until all are done, so many at a time, in their order; waiting in the queue is not counted."""
    ends = [0.0] * running_jobs
    for allocation in allocations:
        heapq.heapreplace(ends, ends[0] + allocation.expected / 60)
    return max(ends)
