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
    return [_allocation(found, nodes, rules) for (_, nodes), packs in groups.items() for found in packs]


def _allocation(steps: Sequence[Step], nodes: int, rules: Packing) -> Allocation:
    experiment, expected = steps[0].experiment, sum(step.minutes + rules.start_minutes for step in steps)
    digest = hashlib.sha256(repr([(step.record, step.attempt) for step in steps]).encode()).hexdigest()[:8]
    found = Allocation(
        name=f"{experiment}-{nodes}n-{digest}" if isinstance(rules, Slurm) else f"{experiment}-{digest}",
        experiment=experiment,
        nodes=nodes,
        expected=round(expected, 2),
        jobs=[step.record for step in steps],
    )
    if not isinstance(rules, Slurm):
        return found
    minutes, rows = _limit(rules, nodes, expected), _rows(rules)
    if minutes is None:
        raise ConfigError(
            f"slurm.bins: found no row for {nodes} nodes and {expected + ENDING_MINUTES + rules.begin_minutes:.0f}"
            f" minutes, which {found.jobs[0]} needs;"
            f" allowed: {'; '.join(rows.values())}"
        )
    row = next(text for most, text in rows.items() if nodes <= most)
    return found.model_copy(update={"minutes": minutes, "bin": row})


def _limit(slurm: Slurm, nodes: int, expected: float) -> int | None:
    """Minutes to ask for; None where the queue does not give even what is expected."""
    hours = slurm.limit_hours(nodes)
    beside = ENDING_MINUTES + slurm.begin_minutes
    if hours is None or expected + beside > hours * 60:
        return None
    return min(int(hours * 60), max(LEAST_MINUTES, math.ceil(expected * SPARE + beside)))


def _rows(slurm: Slurm) -> dict[int, str]:
    """The queue's rules in words, by the most nodes of each."""
    found, least = dict[int, str](), 1
    for row in sorted(slurm.bins, key=lambda row: row.nodes):
        found.setdefault(row.nodes, f"{least}-{row.nodes} nodes, {row.hours:g} h")
        least = row.nodes + 1
    return found


def wall_hours(allocations: Iterable[Allocation], running_jobs: int) -> float:
    """Until all are done, so many at a time, in their order; waiting in the queue is not counted."""
    ends = [0.0] * running_jobs
    for allocation in allocations:
        heapq.heapreplace(ends, ends[0] + allocation.expected / 60)
    return max(ends)
