"""Which points share an allocation: a Slurm job, as a queue counts jobs and gives whole nodes; on one machine a process,
as each would import torch anew."""

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Protocol

from pydantic import BaseModel

from repro.experiments.base import Shape
from repro.plan.config import ConfigError, Node, Packing, Slurm

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
    """Points that run one after the other. `jobs` names the records it makes; `expected` is the minutes they should
    take. Of a Slurm job: `minutes` is the limit it asks for, `bin` the row of the queue's rules that it falls into."""

    name: str
    experiment: str
    nodes: int
    expected: float
    jobs: list[str]
    minutes: int = 0
    bin: str = ""

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


def pack(steps: Iterable[Step], rules: Packing) -> list[Allocation]:
    """Points of one experiment, and of one node count in a queue, in their order, in allocations of about
    `pack_minutes`. ConfigError where the queue has no place for a point."""
    slurm = rules if isinstance(rules, Slurm) else None
    groups: dict[tuple[str, int], list[list[Step]]] = {}
    filled: dict[tuple[str, int], float] = {}
    for step in steps:
        key, minutes = (step.experiment, step.nodes if slurm else 1), step.minutes + rules.start_minutes
        packs = groups.setdefault(key, [])
        together = filled.get(key, math.inf) + minutes
        if together > rules.pack_minutes or (slurm and _limit(slurm, step.nodes, together) is None):
            packs.append([])
            together = minutes
        packs[-1].append(step)
        filled[key] = together
    return [
        _allocation(steps, nodes, rules.start_minutes, slurm) for (_, nodes), packs in groups.items() for steps in packs
    ]


def _allocation(steps: Sequence[Step], nodes: int, start_minutes: float, slurm: Slurm | None) -> Allocation:
    experiment, expected = steps[0].experiment, sum(step.minutes + start_minutes for step in steps)
    digest = hashlib.sha256(repr([(step.record, step.attempt) for step in steps]).encode()).hexdigest()[:8]
    found = Allocation(
        name=f"{experiment}-{nodes}n-{digest}" if slurm else f"{experiment}-{digest}",
        experiment=experiment,
        nodes=nodes,
        expected=round(expected, 2),
        jobs=[step.record for step in steps],
    )
    if slurm is None:
        return found
    minutes, rows = _limit(slurm, nodes, expected), sorted(slurm.bins, key=lambda row: row.nodes)
    if minutes is None:
        raise ConfigError(
            f"slurm.bins: found no row for {nodes} nodes and {expected:.0f} minutes, which {found.jobs[0]} needs;"
            f" allowed: {'; '.join(_row(slurm, number) for number in range(len(rows)))}"
        )
    number = next(i for i, row in enumerate(rows) if nodes <= row.nodes)
    return found.model_copy(update={"minutes": minutes, "bin": _row(slurm, number)})


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
