"""Algorithms of collectives, each as the rounds that it consists of.

In each round a rank sends one message, or in a direct exchange one to every other rank. The busiest link of each level
decides how long it takes. So an algorithm is a short list of `Stage`s, which `collectives.seconds` adds up.

    ring                 p - 1 rounds to the next rank: little traffic over slow levels, but latency grows with p
    tree                 NCCL's all-reduce: up and down a binary tree of nodes, a chain inside a node. There are two
                         trees with half of the tensor each, so that every link is busy in both directions. A rank sends
                         on a chunk at a time: every hop waits for one
    recursive_doubling   log2 p rounds with a partner twice as far each time (a reduction halves). Where p is not a
                         power of two, a reduction first folds the odd ranks into their neighbours, as MPICH does
    bruck                as many rounds, for any p (all-gather and all-to-all)
    rabenseifner         all-reduce: recursive halving, then recursive doubling; the nearest partner gets half of the
                         tensor and the farthest 1/p of it, as MPICH does, the other way round than in a reduce-scatter
    pairwise             p - 1 rounds, each with another partner
    direct               one round, every rank to every other
    hierarchical         one collective per level, so that slow levels carry each byte once
    in_network           switches add up and multicast: NVLink SHARP ("NVLS") inside a node, SHARP between nodes. Where
                         only the inner switches can, an all-reduce goes between the nodes as a tree (NCCL's NVLSTree)

Sizes are in units of one rank's whole tensor: the output of an all-gather, the input of a reduce-scatter, the tensor of
an all-reduce, the send buffer of an all-to-all.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]
Algorithm = Literal[
    "ring", "tree", "recursive_doubling", "bruck", "rabenseifner", "pairwise", "direct", "hierarchical", "in_network"
]

ALGORITHMS: dict[Kind, tuple[Algorithm, ...]] = {
    "all_gather": ("ring", "recursive_doubling", "bruck", "pairwise", "direct", "hierarchical", "in_network"),
    "reduce_scatter": ("ring", "recursive_doubling", "pairwise", "direct", "hierarchical", "in_network"),
    "all_reduce": ("ring", "tree", "recursive_doubling", "rabenseifner", "hierarchical", "in_network"),
    "all_to_all": ("pairwise", "bruck", "direct", "hierarchical"),
    "send_recv": ("direct",),
}


@dataclass(frozen=True)
class Stage:
    """Equal rounds, one after the other.

    hops      per level: how many messages of the longest chain cross it, each of which costs a latency
    rounds    how many there are
    switched  levels whose switches do the work, at their own latency and rate
    peers     further ranks to which a rank begins a message in a round
    pipelined  one message crosses all hops, a chunk after the other: a rank sends on what it has (`Protocol.chunk_bytes`)

    In units of the whole tensor:

    loads     per level: what the busiest link carries in a round
    message   size of one message, which decides the protocol
    sent      what a rank sends in a round
    reduced   what a rank adds up in a round
    """

    hops: tuple[float, ...]
    rounds: float
    loads: tuple[float, ...]
    message: float
    sent: float
    reduced: float = 0.0
    switched: frozenset[int] = frozenset()
    peers: int = 0
    pipelined: bool = False


class Group(NamedTuple):
    """A process group that spans some consecutive levels of a machine.

    sizes      of the levels, innermost first
    counts     links out of a unit of each level
    below      ranks of a unit below the first level; each belongs to another such group, and all groups work at once
    channels   rings side by side, each of which leaves a unit through another link
    switches   levels whose switches add up
    """

    sizes: tuple[int, ...]
    counts: tuple[float, ...]
    below: int
    channels: float
    switches: frozenset[int] = frozenset()

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def outermost(self) -> int:
        """The last level with more than one member."""
        return max(level for level, size in enumerate(self.sizes) if size > 1)

    def units(self) -> list[int]:
        """For each level: members of the group inside one unit of the level below."""
        return [math.prod(self.sizes[:level]) for level in range(len(self.sizes))]

    def load(self, level: int, messages: float) -> float:
        """Messages on the busiest link of a level when so many `messages` of each group leave a unit at once."""
        flows = messages * self.below
        return flows / min(self.counts[level], max(flows, 1.0))


def possible(algorithm: Algorithm, kind: Kind, group: Group) -> bool:
    """Whether an algorithm works in a group: an all-gather by doubling needs a power of two, and `in_network` switches
    that add up, on all levels; an all-reduce can do without them on the outermost of several."""
    if algorithm == "in_network":
        needed = {level for level, size in enumerate(group.sizes) if size > 1}
        missing = needed - group.switches
        return not missing or (kind == "all_reduce" and len(needed) > 1 and missing == {group.outermost})
    return not (kind == "all_gather" and algorithm == "recursive_doubling") or group.ranks & (group.ranks - 1) == 0


@lru_cache(maxsize=4096)
def stages(kind: Kind, algorithm: Algorithm, group: Group) -> Sequence[Stage]:
    """The rounds of a collective in a group. ValueError for an algorithm that is not `possible` there."""
    p = group.ranks
    if not possible(algorithm, kind, group):
        needs = "switches that add up on its levels" if algorithm == "in_network" else "a power of two"
        raise ValueError(f"{kind} by {algorithm} needs {needs}, found {p} ranks in levels of {group.sizes}")
    if algorithm == "in_network":
        return [_in_network(kind, group)]
    if kind == "send_recv":  # between units of the outermost level, while no other rank sends
        only = _only(group, group.outermost, 1)
        return [Stage(only, 1, only, 1.0, 1.0)]
    if algorithm == "tree":
        return [_tree(group)]
    if algorithm == "ring":
        return [_ring(group, 1 / p, _reduced(half, 1 / p)) for half in halves(kind)]
    if algorithm in ("recursive_doubling", "rabenseifner"):
        return list(_doubling(kind, algorithm, group))
    if algorithm == "bruck":
        distances = [2**k for k in range(math.ceil(math.log2(p)))]
        blocks = [min(d, p - d) if kind == "all_gather" else _with_bit(p, d) for d in distances]
        return [_shift(group, distance, sent / p) for distance, sent in zip(distances, blocks, strict=True)]
    if algorithm == "pairwise":
        rounds = [unit * (size - 1) for unit, size in zip(group.units(), group.sizes, strict=True)]
        return [_at_level(group, i, n, 1 / p, _reduced(kind, 1 / p)) for i, n in enumerate(rounds) if n]
    return [_direct(group, 1 / p, _reduced(kind, (p - 1) / p))]


def _doubling(kind: Kind, algorithm: Algorithm, group: Group) -> Iterator[Stage]:
    """Rounds among the nearest power of two of the ranks, before and after which the others are folded in."""
    p = group.ranks
    distances = [2**k for k in range(math.floor(math.log2(p)))]
    power = 2 ** len(distances)
    if p > power:
        yield _exchange(group, 1, 1.0, reduced=1.0)
    if kind == "all_reduce" and algorithm == "recursive_doubling":  # whole tensors
        yield from (_exchange(group, distance, 1.0, reduced=1.0) for distance in distances)
    else:
        for half, distance in itertools.product(halves(kind), distances):
            share = 1 / (2 * distance) if kind == "all_reduce" else distance / power
            yield _exchange(group, distance, share, _reduced(half, share))
    if p > power:
        yield _exchange(group, 1, 1 / p if kind == "reduce_scatter" else 1.0)


def _ring(group: Group, message: float, reduced: float) -> Stage:
    """Every rank to the next one: one message leaves every unit, cut between the channels. On its way around the ring a
    block meets every link once and waits for no other, so the latency of a round is the average over the links."""
    p, units = group.ranks, [*group.units(), group.ranks]
    edges = [p / units[i] - (p / units[i + 1] if units[i + 1] < p else 0) for i in range(len(group.sizes))]
    hops = tuple((p - 1) / p * count if group.sizes[i] > 1 else 0.0 for i, count in enumerate(edges))
    return Stage(hops, p - 1, _one_each(group, message), message, message, reduced)


def _tree(group: Group) -> Stage:
    """Up and down: a chain inside every unit of the inner levels, and a binary tree over the outermost level."""
    *inside, outside = group.sizes
    hops = (*(2.0 * (size - 1) for size in inside), 2.0 * math.ceil(math.log2(outside)) if outside > 1 else 0.0)
    loads = tuple(_of_tree(size) * load for size, load in zip(group.sizes, _one_each(group, 1.0), strict=True))
    return Stage(hops, 1, loads, 1 / group.channels, 1.0, 1.0, pipelined=True)


def _of_tree(size: int) -> float:
    """Tensors that a unit sends. It is a leaf of one of the two trees; in the other it sends half the tensor to its
    parent and to two children. Of two units each is the root of one tree and the leaf of the other."""
    return 1.0 if size == 2 else 2.0


def _in_network(kind: Kind, group: Group) -> Stage:
    """NCCL's NVLS and CollNet: a switch reads a shard from all ranks, adds up, and its owner stores it to all by
    multicast. A rank's link carries the whole tensor once, and in an all-reduce the owner's result besides (in the
    other direction for the other half, so the busier direction counts). Then every shard goes over the next level."""
    hops, loads, shard, message, pipelined = [], [], 1.0, 1 / group.ranks, False
    for level, (unit, size) in enumerate(zip(group.units(), group.sizes, strict=True)):
        by_tree = level not in group.switches and size > 1
        if by_tree:  # the shard goes up and down in chunks
            message, pipelined = shard, True
        crossings = _of_tree(size) if by_tree else 1 + (1 / size if kind == "all_reduce" and level == 0 else 0)
        hops.append(2.0 * math.ceil(math.log2(size)) if by_tree else float(size > 1))
        loads.append(crossings * shard * group.load(level, unit) if size > 1 else 0.0)
        shard /= size
    return Stage(tuple(hops), 1, tuple(loads), message, 1.0, switched=group.switches, pipelined=pipelined)


def _one_each(group: Group, message: float) -> tuple[float, ...]:
    """Loads when one message leaves every unit, cut between the channels."""
    channels = enumerate(min(group.channels, unit) for unit in group.units())
    return tuple(message * group.load(i, some) / some if group.sizes[i] > 1 else 0.0 for i, some in channels)


def _exchange(group: Group, distance: int, message: float, reduced: float = 0.0) -> Stage:
    """With the partner whose number differs in the bit of `distance`. All messages cross the same level where the sizes
    inside are powers of two; elsewhere that is an approximation."""
    level = max(i for i, unit in enumerate(group.units()) if unit <= distance and group.sizes[i] > 1)
    return _at_level(group, level, 1, message, reduced)


def _at_level(group: Group, level: int, rounds: float, message: float, reduced: float) -> Stage:
    """Rounds in which every rank's message crosses `level` and no other."""
    loads = _only(group, level, message * group.load(level, group.units()[level]))
    return Stage(_only(group, level, rounds), rounds, loads, message, message, reduced)


def _shift(group: Group, distance: int, message: float) -> Stage:
    """Rank r to rank r + distance: all ranks of a unit below the distance send out of it, of larger units only some."""
    loads = [
        message * group.load(level, min(unit, distance)) if size > 1 and distance < unit * size else 0.0
        for level, (unit, size) in enumerate(zip(group.units(), group.sizes, strict=True))
    ]
    outermost = max(level for level, load in enumerate(loads) if load)
    return Stage(_only(group, outermost, 1), 1, tuple(loads), message, message)


def _direct(group: Group, message: float, reduced: float) -> Stage:
    """Every rank to every other at once: one latency, and all bytes."""
    loads = tuple(  # of `unit * size - unit` peers that a rank reaches over a level
        message * (unit * size - unit) * group.load(level, unit) if size > 1 else 0.0
        for level, (unit, size) in enumerate(zip(group.units(), group.sizes, strict=True))
    )
    hops, peers = _only(group, group.outermost, 1), group.ranks - 2
    return Stage(hops, 1, loads, message, message * (group.ranks - 1), reduced, peers=peers)


def _only(group: Group, level: int, value: float) -> tuple[float, ...]:
    """`value` at one level, 0 at the others."""
    return tuple(value if other == level else 0.0 for other in range(len(group.sizes)))


def halves(kind: Kind) -> tuple[Kind, ...]:
    """Those that a collective consists of: an all-reduce is a reduce-scatter and an all-gather."""
    return ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,)


def _reduced(kind: Kind, share: float) -> float:
    return share if kind == "reduce_scatter" else 0.0


def _with_bit(ranks: int, bit: int) -> int:
    """How many numbers below `ranks` have the bit of this value: blocks that a round of Bruck's all-to-all sends on."""
    return ranks // (2 * bit) * bit + max(0, ranks % (2 * bit) - bit)
