"""The best plan for a model on a machine: every partition, with the routes that suit it, by predicted step time.

This generalises the hierarchical plan of arXiv 2501.04266 (one point), MiCS (all states over one level) and AMSP (each state
over its own level, arXiv 2311.00257) to a secondary copy and to the bits of every level.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from repro import comm
from repro.comm import Route
from repro.topology import Topology
from repro.zero import memory as bytes_of
from repro.zero import traffic
from repro.zero.layout import Layout, layout
from repro.zero.plan.catalogue import BLOCK
from repro.zero.plan.space import Plan


@dataclass(frozen=True)
class Machine:
    """What a step costs beside its bytes. `compute_s`: forward, backward and update of one step without any communication;
    `quantize_values_per_s`: values that a rank quantises (and the other side restores) per second; `native`: collectives are
    the backend's (NCCL, RCCL), which are taken as rings."""

    compute_s: float = 0.0
    quantize_values_per_s: float = math.inf
    native: bool = False


@dataclass(frozen=True)
class Candidate:
    """A plan with its predicted step time and bytes per rank (states and working memory)."""

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
    machine: Machine = Machine(),
    activations: int = 0,
    gradient_bytes: int = 4,
    block: int = BLOCK,
) -> list[Candidate]:
    """All valid plans that need at most `memory` bytes per rank, the fastest first (then the smallest).

    model            a model, on the meta device where it is large, or its `Layout`
    topology         with the rates per rank of every level
    micro_batches    backward passes per step: the more, the more it pays to keep slow levels out of them
    weight_bits, gradient_bits   what a hop may send; only 16: plans that train exactly as DDP does
    activations      bytes per rank to leave room for, see `memory.activations`

    Every partition of the three states and the copy is looked at; each of its routes is the fastest of one flat ring, node and
    network in two hops, and one hop per level with any of the bits on each, which is the best of all combinations because
    the times of a step's exchanges add up. Raises ValueError when nothing fits, and says what the smallest plan needs.
    """
    shapes = model if isinstance(model, Layout) else layout(model)
    candidates = []
    for bare in partitions(topology, block):
        plan = _with_best_routes(bare, shapes, micro_batches, weight_bits, gradient_bits, machine)
        need = sum(bytes_of.predict(plan, shapes, gradient_bytes=gradient_bytes).values())
        need += bytes_of.working(plan, shapes) + activations
        seconds = traffic.step_seconds(
            plan,
            shapes,
            micro_batches,
            compute_s=machine.compute_s,
            quantize_values_per_s=machine.quantize_values_per_s,
            native=machine.native,
        )
        candidates.append(Candidate(plan, seconds, need))
    fitting = [candidate for candidate in candidates if candidate.rank_bytes <= memory]
    if not fitting:
        least = min(candidates, key=lambda candidate: candidate.rank_bytes)
        raise ValueError(
            f"no plan fits {memory / 1e9:.1f} GB per rank; the smallest, {least.plan.name}, needs {least.rank_bytes / 1e9:.1f} GB"
        )
    return sorted(fitting, key=lambda candidate: (candidate.step_s, candidate.rank_bytes))


def partitions(topology: Topology, block: int = BLOCK) -> Iterator[Plan]:
    """Every valid choice of levels, with 16-bit hierarchical routes: weights no wider than gradients, gradients no wider than
    the optimizer, a copy narrower than the weights. Named `weights[+copy]/gradients/optimizer`.

    Levels of one member are left out: they split nothing. So are plans that reduce across after every micro-batch where the
    one with gradients over the optimizer's level does the same.
    """
    levels = (None, *(level.name for level in topology.levels if level.size > 1))
    route = comm.hierarchical(topology, 16, block)
    for weights, gradients, optimizer in itertools.combinations_with_replacement(levels, 3):
        for copy in (None, *levels[1 : levels.index(weights)]):
            plan = Plan("", topology, weights, gradients, optimizer, route, route, route, copy, copy and route)
            plan = replace(plan, name=_name(plan))
            yield plan
            if gradients == optimizer != levels[-1]:
                yield replace(plan, name=f"{plan.name}, all-reduce per micro-batch", reduce_across="micro_batch")


def _name(plan: Plan) -> str:
    copy = f"+{plan.secondary}" if plan.secondary else ""
    return f"{plan.weights or '-'}{copy}/{plan.gradients or '-'}/{plan.optimizer or '-'}"


def _with_best_routes(
    plan: Plan,
    shapes: Layout,
    micro_batches: int,
    weight_bits: Sequence[int],
    gradient_bits: Sequence[int],
    machine: Machine,
) -> Plan:
    """The plan with the fastest of `routes` for each kind of message, chosen one after the other."""
    block = plan.weight_route.block
    for field, bits in (
        ("weight_route", weight_bits),
        ("secondary_route", weight_bits),
        ("gradient_route", gradient_bits),
        ("update_route", weight_bits),
    ):
        if getattr(plan, field) is None:
            continue
        choices = [replace(plan, **{field: route}) for route in routes(plan.topology, bits, block)]
        # Of equals the first: 16 bits where a level is not used at all.
        plan = min(choices, key=lambda choice: _message_seconds(choice, shapes, micro_batches, machine))
    return plan


def _message_seconds(plan: Plan, shapes: Layout, micro_batches: int, machine: Machine) -> float:
    return traffic.step_seconds(
        plan, shapes, micro_batches, quantize_values_per_s=machine.quantize_values_per_s, native=machine.native
    )


def routes(topology: Topology, bits: Sequence[int], block: int = BLOCK) -> Iterator[Route]:
    """One hop per level with any of `bits` on each; one ring over all levels; and a hop in the node and one across."""
    names = topology.names
    ordered = sorted(bits, reverse=True)
    for each in itertools.product(ordered, repeat=len(names)):
        yield comm.hierarchical(topology, each, block)
    for one in ordered:
        yield comm.flat(topology, one, block)
    if len(names) > 2:
        for two in itertools.product(ordered, repeat=2):
            yield Route((names[:-1], names[-1:]), two, block)
