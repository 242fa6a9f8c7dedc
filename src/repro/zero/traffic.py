"""Bytes that a step moves over each level, and the time that takes: arithmetic that the ledger of real runs is checked
against.

A step is a list of collectives (`collectives`), each a walk over hops; a hop of k ranks moves k - 1 payloads per rank.
The slow level decides: what a plan saves shows in which collectives reach it, how often, and with how many bits.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from repro.comm import Route
from repro.quantize import payload_bytes
from repro.topology import Topology
from repro.zero.layout import BucketLayout, Layout, shard_numel, up_to_multiple
from repro.zero.memory import SUM_BYTES, WEIGHT_BYTES
from repro.zero.plan import Plan

Kind = Literal["gather", "reduce"]


@dataclass(frozen=True)
class Collective:
    """`times` all-gathers of shards of `numel` values over `route`, or reduce-scatters of tensors of `numel` values.
    `itemsize`: bytes of a value that is not narrowed."""

    kind: Kind
    route: Route | None  # None: nothing to send
    numel: int
    itemsize: int
    times: int


@dataclass(frozen=True)
class Hop:
    """One hop of a collective, in every group of ranks that differ in `levels`, of `sizes`.

    payload     bytes that a rank has for each of the others (a reduction), or that it gathers from each
    quantised   values that a rank quantises for it; 0 when the hop sends floats
    restored    values that a rank turns back into floats after it: each piece that it adds up, or all that it has
                gathered, once they go no further as they are
    """

    kind: Kind
    levels: tuple[str, ...]
    sizes: tuple[int, ...]
    bits: int
    payload: int
    quantised: int
    restored: int

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def in_rings(self, native: bool = False) -> bool:
        """Whether pieces go around rings; else everybody sends to everybody. `native`: the backend's collectives."""
        several = sum(size > 1 for size in self.sizes) > 1
        return (native or several) and (self.kind == "gather" or self.bits >= 16)

    def sent(self, native: bool = False) -> dict[str, int]:
        """Bytes that a group together sends over each level.

        A ring enters every unit of a level once, whichever of `comm.route.ring_orders` it is, so the number of rings
        does not matter.
        """
        spans = list(accumulate(self.sizes, operator.mul, initial=1))
        if self.in_rings(native):
            leaving = [self.ranks // span if span < self.ranks else 0 for span in spans]  # links that leave such a unit
            messages = [(self.ranks - 1) * (links - outside) for links, outside in pairwise(leaving)]
        else:
            messages = [self.ranks * (outside - span) for span, outside in pairwise(spans)]
        return {level: count * self.payload for level, count in zip(self.levels, messages, strict=True)}


def collectives(plan: Plan, model: Layout, micro_batches: int = 1) -> Iterator[Collective]:
    """Everything that one step with `micro_batches` backward passes sends, weights in 16 bits.

    Of buckets that are frozen as a whole it is an upper bound: their secondary shards stay after the first step, and
    those before all trained ones are gathered for the forward alone.
    """
    for bucket, alike in Counter(model.buckets).items():
        for collective in _of_bucket(plan, bucket, micro_batches):
            if collective.route is not None and collective.numel and collective.times:
                yield replace(collective, times=alike * collective.times)


def _of_bucket(plan: Plan, bucket: BucketLayout, micro_batches: int) -> list[Collective]:
    moves = plan.moves
    passes = 2 * micro_batches  # a gather before every forward and every backward
    across = micro_batches if plan.reduce_across == "micro_batch" else 1
    weights, gradients, optimizer = (plan.degree(v) for v in (plan.weights, plan.gradients, plan.optimizer))
    outside = plan.topology.world_size // optimizer
    trained = shard_numel(bucket.trainable, weights)
    shard = trained + shard_numel(bucket.frozen, weights)
    padded = up_to_multiple(trained, optimizer // weights)
    master = padded * weights // optimizer

    weight_gathers = 1 if plan.has_secondary else passes
    secondary = weights * shard // plan.degree(plan.secondary)
    return [
        Collective("gather", moves.gather_weights, shard, WEIGHT_BYTES, weight_gathers),
        Collective("gather", moves.gather_secondary, secondary, WEIGHT_BYTES, passes - weight_gathers),
        Collective("reduce", moves.reduce_to_weights, weights * trained, SUM_BYTES, micro_batches),
        Collective("reduce", moves.reduce_to_gradients, padded, SUM_BYTES, micro_batches),
        Collective("reduce", moves.reduce_to_optimizer, padded * weights // gradients, SUM_BYTES, across),
        Collective("reduce", moves.all_reduce_replicas, up_to_multiple(master, outside), SUM_BYTES, across),
        Collective("gather", moves.all_reduce_replicas, -(-master // outside), SUM_BYTES, across),
        Collective("gather", moves.gather_updated, master, WEIGHT_BYTES, 1),
    ]


def hops(collective: Collective, topology: Topology) -> Iterator[Hop]:
    """The hops of one such collective, in the order in which they are made; hops of one rank send nothing."""
    assert collective.route is not None, "`collectives` leaves out what is not sent"
    level_size = {level.name: level.size for level in topology.levels}
    route, gathers = collective.route, collective.kind == "gather"
    sized = [tuple(level_size[name] for name in levels) for levels in route.hops]
    walk = [each for each in zip(route.hops, sized, route.bits, strict=True) if math.prod(each[1]) > 1]
    walk = walk[::-1] if gathers else walk
    numel, pieces, all_bits = collective.numel, 1, [None, *(bits for _, _, bits in walk), None]
    for (levels, sizes, bits), before, after in zip(walk, all_bits, all_bits[2:], strict=False):
        ranks = math.prod(sizes)
        numel = numel if gathers else numel // ranks
        full = numel * min(collective.itemsize, bits // 8)
        payload = pieces * (payload_bytes(numel, bits, route.block) if bits < 16 else full)
        quantised = restored = 0
        if bits < 16 and gathers:  # between hops of equal bits a gathered payload travels on as it is
            quantised = 0 if bits == before else numel * pieces
            restored = 0 if bits == after else numel * pieces * ranks
        elif bits < 16:
            quantised = restored = numel * (ranks - 1)
        yield Hop(collective.kind, levels, sizes, bits, payload, quantised, restored)
        pieces = pieces * ranks if gathers else 1


def step_bytes(plan: Plan, model: Layout, micro_batches: int = 1, native: bool = False) -> dict[str, int]:
    """Payload bytes per level that all ranks together send in a step: the sum of their ledgers."""
    total = dict.fromkeys(plan.topology.names, 0)
    for collective in collectives(plan, model, micro_batches):
        for hop in hops(collective, plan.topology):
            groups = plan.topology.world_size // hop.ranks
            for level, nbytes in hop.sent(native).items():
                total[level] += collective.times * groups * nbytes
    return total


def hop_seconds(hop: Hop, topology: Topology, quantize_values_per_s: float = math.inf) -> float:
    """Time of a hop: the busiest level's bytes per rank over its rate, a latency per round, and quantising
    and restoring.

    All levels of a hop work at the same time; rates are per rank with all ranks busy (`Level.bytes_per_s`). What
    crosses an outer level leaves through the rank's own link too.
    """
    sent = hop.sent()
    busy = [sum(sent.values()) / hop.ranks / topology.levels[0].bytes_per_s]
    latency = 0.0
    for level in topology.levels:
        if nbytes := sent.get(level.name, 0):
            busy.append(nbytes / hop.ranks / level.bytes_per_s)
            latency = max(latency, level.latency_s)
    rounds = hop.ranks - 1 if hop.in_rings() else 1
    return max(busy) + rounds * latency + (hop.quantised + hop.restored) / quantize_values_per_s


def step_seconds(
    plan: Plan,
    model: Layout,
    micro_batches: int = 1,
    *,
    compute_s: float = 0.0,
    quantize_values_per_s: float = math.inf,
) -> float:
    """Predicted time of a step without overlap: `compute_s`, and its exchanges one after the other."""
    return compute_s + sum(
        collective.times * hop_seconds(hop, plan.topology, quantize_values_per_s)
        for collective in collectives(plan, model, micro_batches)
        for hop in hops(collective, plan.topology)
    )


def bound_seconds(plan: Plan, model: Layout, micro_batches: int = 1, *, compute_s: float = 0.0) -> float:
    """No step is shorter, however it overlaps: the longest of `compute_s` and, of each level, its bytes over its rate.

    Bytes are those of the average rank. What crosses an outer level leaves through the rank's own link too, so the
    innermost level carries all of them.
    """
    sent = step_bytes(plan, model, micro_batches)
    of_level = {plan.topology.names[0]: sum(sent.values())} | dict(list(sent.items())[1:])
    ranks = plan.topology.world_size
    return max(compute_s, *(of_level[level.name] / ranks / level.bytes_per_s for level in plan.topology.levels))
