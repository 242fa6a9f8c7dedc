"""Algorithms of collectives, each as the rounds that it consists of.

Round by round each rank sends one message (or, in a direct exchange, one to everybody at once). What decides is the busiest link of
each level: how many messages leave a unit at the same time, over how many links. That is all an algorithm is here, a short list of
`Stage`s; `collectives.seconds` adds them up for any size of tensor.

    ring                 p - 1 rounds to the next rank; little traffic over slow levels, latency grows with p
    tree                 all-reduce as NCCL's trees: up and down a binary tree of nodes, a chain inside; in two halves, so that every
                         link is busy in both directions
    recursive_doubling   log2 p rounds with a partner twice as far each time (halving, for a reduction). A reduction among other
                         than a power of two first folds the odd ranks into their neighbours, as MPICH does
    bruck                as many rounds, for any p (all-gather and all-to-all)
    rabenseifner         all-reduce: recursive halving, then recursive doubling
    pairwise             p - 1 rounds, each with another partner
    direct               one round, everybody to everybody
    hierarchical         one collective per level, so that slow levels see each byte once (`inner` for each of them)

n is always the whole tensor of one rank: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce,
the send buffer of an all-to-all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv"]
Algorithm = Literal["ring", "tree", "recursive_doubling", "bruck", "rabenseifner", "pairwise", "direct", "hierarchical"]

ALGORITHMS: dict[Kind, tuple[Algorithm, ...]] = {
    "all_gather": ("ring", "recursive_doubling", "bruck", "pairwise", "direct", "hierarchical"),
    "reduce_scatter": ("ring", "recursive_doubling", "pairwise", "direct", "hierarchical"),
    "all_reduce": ("ring", "tree", "recursive_doubling", "rabenseifner", "hierarchical"),
    "all_to_all": ("pairwise", "bruck", "direct", "hierarchical"),
    "send_recv": ("direct",),
}


@dataclass(frozen=True)
class Stage:
    """Rounds one after the other, all alike.

    hops      per level, how many messages of the chain that ends last cross it: what latency counts
    rounds    how many there are

    and in units of the whole tensor:

    loads     per level, what the busiest link carries in a round
    message   what a rank sends in one message (decides the protocol)
    sent      what a rank sends in a round in all
    reduced   what a rank adds up in a round
    """

    hops: tuple[float, ...]
    rounds: float
    loads: tuple[float, ...]
    message: float
    sent: float
    reduced: float = 0.0


class Shape(NamedTuple):
    """A hop of a machine's levels: their sizes, the links out of a unit of each, and the ranks below the hop, all of which run it at the
    same time with peers of their own. `channels`: rings side by side, each leaving a unit through another link."""

    sizes: tuple[int, ...]
    counts: tuple[float, ...]
    below: int
    channels: float

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    def units(self) -> list[int]:
        """Members of the hop inside one unit of the level below, for each level."""
        return [math.prod(self.sizes[:level]) for level in range(len(self.sizes))]

    def load(self, level: int, messages: float) -> float:
        """What the busiest link carries, in messages, when so many of each group leave a unit at once."""
        flows = messages * self.below
        return flows / min(self.counts[level], max(flows, 1.0)) if flows else 0.0


@lru_cache(maxsize=4096)
def stages(kind: Kind, algorithm: Algorithm, shape: Shape) -> tuple[Stage, ...]:
    """The rounds of a collective in a hop. Raises ValueError for an all-gather by doubling among other than a power of two."""
    if not possible(algorithm, kind, shape.ranks):
        raise ValueError(f"all_gather by {algorithm} needs a power of two, found {shape.ranks} ranks; allowed: bruck")
    return tuple(_stages(kind, algorithm, shape))


def _stages(kind: Kind, algorithm: Algorithm, shape: Shape) -> Iterator[Stage]:
    p = shape.ranks
    power = 2 ** math.floor(math.log2(p))
    if kind == "send_recv":
        yield _one_message(shape)
    elif algorithm == "tree":
        yield _tree(shape)
    elif algorithm == "ring":
        for half in ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,):
            yield _ring(shape, 1 / p, _reduced(half, 1 / p))
    elif algorithm in ("recursive_doubling", "rabenseifner"):
        if p > power:
            yield _exchange(shape, 1, 1.0, reduced=1.0)
        yield from _doubling(kind, algorithm, shape, power)
        if p > power:
            yield _exchange(shape, 1, 1 / p if kind == "reduce_scatter" else 1.0)
    elif algorithm == "bruck":
        for k in range(_log2(p)):
            share = min(2**k, p - 2**k) / p if kind == "all_gather" else _with_bit(p, k) / p
            yield _shift(shape, 2**k, share)
    elif algorithm == "pairwise":
        for level, unit in enumerate(shape.units()):
            rounds = unit * (shape.sizes[level] - 1)
            if rounds:
                yield _at_level(shape, level, rounds, 1 / p, _reduced(kind, 1 / p))
    else:
        yield _direct(shape, 1 / p, _reduced(kind, (p - 1) / p))


def _doubling(kind: Kind, algorithm: Algorithm, shape: Shape, power: int) -> Iterator[Stage]:
    """Rounds among the nearest power of two of the ranks."""
    distances = [2**k for k in range(int(math.log2(power)))]
    if kind == "all_reduce" and algorithm == "recursive_doubling":  # whole tensors
        yield from (_exchange(shape, distance, 1.0, reduced=1.0) for distance in distances)
        return
    for half in ("reduce_scatter", "all_gather") if kind == "all_reduce" else (kind,):
        for distance in distances:
            share = distance / power
            yield _exchange(shape, distance, share, _reduced(half, share))


def _ring(shape: Shape, message: float, reduced: float) -> Stage:
    """Everybody to the next one: one message leaves every unit, cut between the channels.

    Nobody waits for the slowest link of a round, only for the message before: a block on its way round meets every link once, so the
    latency of a hop is the average of the ring's links.
    """
    p, units = shape.ranks, [*shape.units(), shape.ranks]
    edges = [p / units[i] - (p / units[i + 1] if units[i + 1] < p else 0) for i in range(len(shape.sizes))]
    hops = tuple((p - 1) / p * count if shape.sizes[i] > 1 else 0.0 for i, count in enumerate(edges))
    channels = [min(shape.channels, unit) for unit in shape.units()]
    loads = tuple(
        shape.load(level, some) / some if shape.sizes[level] > 1 else 0.0 for level, some in enumerate(channels)
    )
    return Stage(hops, p - 1, tuple(message * load for load in loads), message, message, reduced)


def _tree(shape: Shape) -> Stage:
    """Up and down: a chain inside every unit but the outermost, and a binary tree over those."""
    *inside, outside = shape.sizes
    hops = (*(2.0 * (size - 1) for size in inside), 2.0 * math.ceil(math.log2(outside)) if outside > 1 else 0.0)
    loads = tuple(
        2 * shape.load(level, channels) / channels if shape.sizes[level] > 1 else 0.0
        for level, channels in enumerate(min(shape.channels, unit) for unit in shape.units())
    )
    # A unit that is inside one of the two trees sends half the tensor up and to two children, and is a leaf of the other.
    return Stage(hops, 1, loads, 1 / shape.channels, 1.0, 1.0)


def _exchange(shape: Shape, distance: int, message: float, reduced: float = 0.0) -> Stage:
    """Partners whose number differs in the bit of `distance`: all cross the same level."""
    level = max(i for i, unit in enumerate(shape.units()) if unit <= distance and shape.sizes[i] > 1)
    return _at_level(shape, level, 1, message, reduced)


def _at_level(shape: Shape, level: int, rounds: float, message: float, reduced: float) -> Stage:
    """Rounds in which every rank's message crosses `level` and no other."""
    loads = [0.0] * len(shape.sizes)
    loads[level] = message * shape.load(level, shape.units()[level])
    return Stage(_only(shape, level, rounds), rounds, tuple(loads), message, message, reduced)


def _shift(shape: Shape, distance: int, message: float) -> Stage:
    """Rank r to rank r + distance: whole units move on at the levels below the distance, a part of them above it."""
    loads = [
        message * shape.load(level, min(unit, distance)) if size > 1 and distance < unit * size else 0.0
        for level, (unit, size) in enumerate(zip(shape.units(), shape.sizes, strict=True))
    ]
    outermost = max(level for level, load in enumerate(loads) if load)
    return Stage(_only(shape, outermost, 1), 1, tuple(loads), message, message)


def _one_message(shape: Shape) -> Stage:
    """Between two ranks that are as far from each other as can be, while nobody else sends."""
    level = max(level for level, size in enumerate(shape.sizes) if size > 1)
    only = _only(shape, level, 1)
    return Stage(only, 1, only, 1.0, 1.0)


def _direct(shape: Shape, message: float, reduced: float) -> Stage:
    """Everybody to everybody at once: one latency, and all bytes."""
    loads = []
    for level, (unit, size) in enumerate(zip(shape.units(), shape.sizes, strict=True)):
        leaving = unit * size - unit  # peers beyond this level's unit that each of its ranks sends to
        loads.append(message * leaving * shape.load(level, unit) if size > 1 else 0.0)
    outermost = max(level for level, size in enumerate(shape.sizes) if size > 1)
    return Stage(_only(shape, outermost, 1), 1, tuple(loads), message, message * (shape.ranks - 1), reduced)


def _only(shape: Shape, level: int, value: float) -> tuple[float, ...]:
    """`value` at one level, 0 at the others."""
    return tuple(value if other == level else 0.0 for other in range(len(shape.sizes)))


def possible(algorithm: Algorithm, kind: Kind, ranks: int) -> bool:
    """Whether an algorithm works among so many ranks: gathering by doubling needs a power of two."""
    return not (kind == "all_gather" and algorithm == "recursive_doubling") or ranks & (ranks - 1) == 0


def _log2(ranks: int) -> int:
    """Rounds until everybody has heard of everybody, doubling each time."""
    return math.ceil(math.log2(ranks))


def _with_bit(ranks: int, bit: int) -> int:
    """Distances below `ranks` in whose number a bit is set: blocks that a round of Bruck's all-to-all sends on."""
    block = 2 ** (bit + 1)
    return ranks // block * 2**bit + max(0, ranks % block - 2**bit)


def _reduced(kind: Kind, share: float) -> float:
    return share if kind == "reduce_scatter" else 0.0


assert set(ALGORITHMS) == set(get_args(Kind))
