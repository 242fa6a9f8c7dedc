"""Bytes that a step moves over each level, and the time that takes: arithmetic that the ledger of real runs is checked
against.

A step is a list of collectives (`collectives`), each a walk over hops; a hop of k ranks moves k - 1 payloads per rank.
The slow level decides: what a plan saves shows in which collectives reach it, how often, and with how many bits.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from repro.comm import Route, ring_orders
from repro.quantize import payload_bytes
from repro.topology import Topology
from repro.zero.layout import BucketLayout, Layout, shard_numel, up_to_multiple
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
    """

    levels: tuple[str, ...]
    sizes: tuple[int, ...]
    bits: int
    payload: int
    quantised: int

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Exchange:
    """One hop of a collective: bytes that all ranks of the machine together send over each level, how many messages a
    rank sends one after the other, and how many values a rank quantises (0 when the hop sends floats)."""

    sent: dict[str, int]
    rounds: int
    quantised: int


def collectives(plan: Plan, model: Layout, micro_batches: int = 1, weight_bytes: int = 2) -> Iterator[Collective]:
    """Everything that one step with `micro_batches` backward passes sends."""
    for bucket, alike in Counter(model.buckets).items():
        for collective in _of_bucket(plan, bucket, micro_batches, weight_bytes):
            if collective.route is not None and collective.numel and collective.times:
                yield replace(collective, times=alike * collective.times)


def _of_bucket(plan: Plan, bucket: BucketLayout, micro_batches: int, weight_bytes: int) -> list[Collective]:
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
        Collective("gather", moves.gather_weights, shard, weight_bytes, weight_gathers),
        Collective("gather", moves.gather_secondary, secondary, weight_bytes, passes - weight_gathers),
        Collective("reduce", moves.reduce_to_weights, weights * trained, 4, micro_batches),
        Collective("reduce", moves.reduce_to_gradients, padded, 4, micro_batches),
        Collective("reduce", moves.reduce_to_optimizer, padded * weights // gradients, 4, across),
        Collective("reduce", moves.all_reduce_replicas, up_to_multiple(master, outside), 4, across),
        Collective("gather", moves.all_reduce_replicas, -(-master // outside), 4, across),
        Collective("gather", moves.gather_updated, master, weight_bytes, 1),
    ]


def hops(collective: Collective, topology: Topology) -> Iterator[Hop]:
    """The hops of one such collective, in the order in which they are made; hops of one rank send nothing."""
    assert collective.route is not None, "`collectives` leaves out what is not sent"
    level_size = {level.name: level.size for level in topology.levels}
    route, gathers = collective.route, collective.kind == "gather"
    walk = [
        (levels, tuple(level_size[name] for name in levels), bits)
        for levels, bits in zip(route.hops, route.bits, strict=True)
    ]
    numel, pieces, bits_before = collective.numel, 1, None
    for levels, sizes, bits in reversed(walk) if gathers else walk:
        ranks = math.prod(sizes)
        if ranks == 1:
            continue
        numel = numel if gathers else numel // ranks
        full = numel * min(collective.itemsize, bits // 8)
        payload = pieces * (payload_bytes(numel, bits, route.block) if bits < 16 else full)
        # Between hops of equal bits a gathered payload travels on as it is.
        quantised = 0 if bits >= 16 or (gathers and bits == bits_before) else numel * (pieces if gathers else ranks - 1)
        yield Hop(levels, sizes, bits, payload, quantised)
        pieces, bits_before = (pieces * ranks, bits) if gathers else (1, bits)


def exchanges(collective: Collective, topology: Topology, native: bool = False) -> list[Exchange]:
    """What the ranks send in each hop. `native`: one ring per hop, as a backend with collectives of its own is
    counted."""
    found = []
    for hop in hops(collective, topology):
        several = sum(size > 1 for size in hop.sizes) > 1
        rings = (native or several) and (collective.kind == "gather" or hop.bits >= 16)
        if rings and native:
            sent = _single_ring_bytes(hop.sizes, hop.payload)
        elif rings:
            value_bytes = 1 if hop.bits < 16 else min(collective.itemsize, hop.bits // 8)
            sent = _rings_bytes(hop.sizes, hop.payload, value_bytes)
        else:
            sent = _direct_bytes(hop.sizes, hop.payload)
        groups = topology.world_size // hop.ranks
        by_level = {name: nbytes * groups for name, nbytes in zip(hop.levels, sent, strict=True) if nbytes}
        found.append(Exchange(by_level, hop.ranks - 1 if rings else 1, hop.quantised))
    return found


def step_bytes(
    plan: Plan, model: Layout, micro_batches: int = 1, weight_bytes: int = 2, native: bool = False
) -> dict[str, int]:
    """Payload bytes per level that all ranks together send in a step: the sum of their ledgers."""
    total = dict.fromkeys(plan.topology.names, 0)
    for collective in collectives(plan, model, micro_batches, weight_bytes):
        for hop in exchanges(collective, plan.topology, native):
            for level, nbytes in hop.sent.items():
                total[level] += collective.times * nbytes
    return total


def exchange_seconds(hop: Exchange, topology: Topology, quantize_values_per_s: float = math.inf) -> float:
    """Time of an exchange: the busiest level's bytes per rank over its rate, a latency per round, and quantising.

    All levels of a hop work at the same time; rates are per rank with all ranks busy (`Level.bytes_per_s`). What
    crosses an outer level leaves through the rank's own link too.
    """
    ranks = topology.world_size
    inner = topology.levels[0].bytes_per_s
    busy = [sum(hop.sent.values()) / ranks / inner]
    latency = 0.0
    for level in topology.levels:
        if nbytes := hop.sent.get(level.name, 0):
            busy.append(nbytes / ranks / level.bytes_per_s)
            latency = max(latency, level.latency_s)
    return max(busy) + hop.rounds * latency + 2 * hop.quantised / quantize_values_per_s  # and back


def step_seconds(
    plan: Plan,
    model: Layout,
    micro_batches: int = 1,
    *,
    compute_s: float = 0.0,
    quantize_values_per_s: float = math.inf,
    weight_bytes: int = 2,
    native: bool = False,
) -> float:
    """Predicted time of a step without overlap: `compute_s`, and its exchanges one after the other."""
    return compute_s + sum(
        collective.times * exchange_seconds(hop, plan.topology, quantize_values_per_s)
        for collective in collectives(plan, model, micro_batches, weight_bytes)
        for hop in exchanges(collective, plan.topology, native)
    )


def _direct_bytes(sizes: tuple[int, ...], payload: int) -> list[int]:
    """Everybody sends a payload to everybody in a unit of levels of `sizes`: bytes of the whole unit per level."""
    ranks, found, inside = math.prod(sizes), [], 1
    for size in sizes:
        found.append(ranks * (size - 1) * inside * payload)
        inside *= size
    return found


def _rings_bytes(sizes: tuple[int, ...], payload: int, unit: int) -> list[int]:
    """The rings of `comm.ring_orders`: each carries its share of the payload, cut between values of `unit` bytes."""
    ranks, edges = math.prod(sizes), _edges(sizes)
    share, more = divmod(payload // unit, len(edges))
    parts = [unit * (share + (ring < more)) for ring in range(len(edges))]
    return [
        sum((ranks - 1) * part * counts[level] for part, counts in zip(parts, edges, strict=True))
        for level in range(len(sizes))
    ]


def _single_ring_bytes(sizes: tuple[int, ...], payload: int) -> list[int]:
    """One ring in rank order, as the ledger counts collectives of NCCL and RCCL."""
    ranks = math.prod(sizes)
    return [(ranks - 1) * payload * count for count in _crossings(tuple(range(ranks)), sizes)]


@lru_cache
def _edges(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each ring: how many of its links are on each level."""
    return tuple(_crossings(order, sizes) for order in ring_orders(sizes))


def _crossings(order: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    counts = [0] * len(sizes)
    for a, b in zip(order, order[1:] + order[:1], strict=True):
        level = len(sizes) - 1
        unit = math.prod(sizes[:-1])
        while a // unit == b // unit:  # the outermost level on which the two differ
            a, b, level = a % unit, b % unit, level - 1
            unit = math.prod(sizes[:level])
        counts[level] += 1
    return tuple(counts)
