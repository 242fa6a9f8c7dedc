"""The best plan for a model on a machine: every partition, with the routes that suit it, by the cost of a step.

This generalises the hierarchical plan of arXiv 2501.04266 (one point), MiCS (all states over one level) and AMSP (each
state over its own level, arXiv 2311.00257) to a secondary shard of the weights and to the bits of every level.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from torch import nn

from repro import comm
from repro.comm import Route
from repro.topology import Topology
from repro.zero import memory as bytes_of
from repro.zero import traffic
from repro.zero.layout import Layout, layout
from repro.zero.plan import Plan

# Seconds of a step of a plan, for a model's layout and so many micro-batches.
Cost = Callable[[Plan, Layout, int], float]


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted seconds per step, and the bytes that a rank needs as `memory.needed` has them."""

    plan: Plan
    step_s: float
    rank_bytes: int


def search(
    model: nn.Module | Layout,
    topology: Topology,
    memory: float = math.inf,
    *,
    micro_batches: int = 1,
    weight_bits: Sequence[int] = (16, 8),
    gradient_bits: Sequence[int] = (16, 4),
    cost: Cost = traffic.step_seconds,
    activations: int = 0,
    gradient_bytes: int = 4,
    plans: Iterable[Plan] | None = None,
) -> list[Candidate]:
    """All valid plans that need at most `memory` bytes per rank, the fastest first (then the smallest).

    model            a model, on the meta device where it is large, or its `Layout`
    topology         with the rates per rank of every level
    micro_batches    backward passes per step: the more, the more it pays to keep slow levels out of them
    weight_bits, gradient_bits   what a hop may send; by default also INT8 and INT4, with (16,) each nothing quantised
    cost             seconds of a step. The default has no compute and no overlap; `partial(traffic.step_seconds, ...)`
                     adds compute or the speed of quantisers, and `repro.scaling.search` searches with overlap
    activations      bytes per rank to leave room for, see `memory.activations`
    gradient_bytes   of an accumulated gradient value
    plans            look at these, as they are, instead of every partition with its best routes

    Every partition of the three states and the secondary shard is looked at. Each of its routes is the cheapest of: one
    flat hop; two hops, node and network; one hop per level, with any of the bits on each. Routes are chosen one kind
    of message after the other, which finds the best combination where a step's exchanges add up, as in the default
    cost. Raises ValueError when nothing fits, and says what the smallest plan needs; for no plans, no bits, fewer than
    one micro-batch and a plan of another machine; and where the default cost has neither a rate nor a latency of any
    level to tell plans apart by.
    """
    plans = None if plans is None else list(plans)
    _check(topology, micro_batches, {"weight_bits": weight_bits, "gradient_bits": gradient_bits}, plans)
    split = [level for level in topology.levels if level.size > 1]
    free = all(math.isinf(level.bytes_per_s) and not level.latency_s for level in split)
    if cost is traffic.step_seconds and split and free:
        names = ", ".join(level.name for level in split)
        raise ValueError(f"bytes_per_s is inf and latency_s 0 in all of {names}, allowed: a rate or a latency in one")
    shapes = model if isinstance(model, Layout) else layout(model)

    def seconds(plan: Plan) -> float:
        return cost(plan, shapes, micro_batches)

    if plans is None:
        bits = {"weight": weight_bits, "secondary": weight_bits, "gradient": gradient_bits, "update": weight_bits}
        plans = (_with_best_routes(plan, bits, seconds) for plan in partitions(topology))
    candidates = []
    for plan in plans:
        need = bytes_of.needed(plan, shapes, activations, gradient_bytes)
        candidates.append(Candidate(plan, seconds(plan), need))
    fitting = [candidate for candidate in candidates if candidate.rank_bytes <= memory]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.rank_bytes)
        raise ValueError(
            f"no plan fits {memory / 1e9:.4g} GB per rank; the smallest, {least.plan.name}, "
            f"needs {least.rank_bytes / 1e9:.4g} GB"
        )
    return sorted(fitting, key=lambda candidate: (candidate.step_s, candidate.rank_bytes))


def _check(
    topology: Topology, micro_batches: int, bits: dict[str, Sequence[int]], plans: Sequence[Plan] | None
) -> None:
    if not isinstance(micro_batches, Integral) or micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches!r}, allowed: an integer of at least 1")
    for name, some in bits.items():
        if not isinstance(some, Sequence) or not some:
            raise ValueError(f"{name} is {some!r}, allowed: several of 32, 16, 8, 4, or one in a tuple")
    if plans is not None and not plans:
        raise ValueError("plans is empty, allowed: at least one plan, or None for all")
    for plan in plans or ():
        of_plan, machine = ([(level.name, level.size) for level in each.levels] for each in (plan.topology, topology))
        if of_plan != machine:
            raise ValueError(f"plan {plan.name!r} is for levels {of_plan}, the topology has {machine}")


def partitions(topology: Topology) -> Iterator[Plan]:
    """Every valid choice of levels, with 16-bit hierarchical routes: weights no wider than gradients, gradients no
    wider than the optimizer, a secondary shard narrower than the weights. Named
    `weights[+secondary]/gradients/optimizer`.

    Levels of one member are left out: they split nothing. So are plans that reduce across after every micro-batch where
    the one with gradients over the optimizer's level does the same.
    """
    levels = (None, *(level.name for level in topology.levels if level.size > 1))
    route = comm.hierarchical(topology)
    for states in itertools.combinations_with_replacement(levels, 3):
        weights, *others = (level or "-" for level in states)
        for secondary in (None, *levels[1 : levels.index(states[0])]):
            name = "/".join([f"{weights}+{secondary}" if secondary else weights, *others])
            plan = Plan(name, topology, *states, route, route, route, secondary, route if secondary else None)
            yield plan
            if plan.gradients == plan.optimizer != levels[-1]:
                yield replace(plan, name=f"{name}, all-reduce per micro-batch", reduce_across="micro_batch")


def _with_best_routes(plan: Plan, bits: dict[str, Sequence[int]], seconds: Callable[[Plan], float]) -> Plan:
    """The plan with the cheapest of `routes` for each kind of message, chosen one after the other. `bits`: by kind."""
    for kind, allowed in bits.items():
        if getattr(plan, f"{kind}_route") is not None:
            changes: list[dict[str, Any]] = [{f"{kind}_route": route} for route in routes(plan.topology, allowed)]
            # Of equals the first: 16 bits where a level is not used at all.
            plan = min((replace(plan, **change) for change in changes), key=seconds)
    return plan


def routes(topology: Topology, bits: Sequence[int]) -> Iterator[Route]:
    """One hop per level with any of `bits` on each; one hop over all levels; and a hop in the node and one across."""
    names = topology.names
    ordered = sorted(bits, reverse=True)
    for each in itertools.product(ordered, repeat=len(names)):
        yield comm.hierarchical(topology, each)
    for one in ordered:
        yield comm.flat(topology, one)
    if len(names) > 2:
        for two in itertools.product(ordered, repeat=2):
            yield Route((names[:-1], names[-1:]), two)
