"""A step of this package's engine on an emulated network, message by message: a discrete-event simulation.

What is simulated is the engine's program (`repro.zero.engine`): forwards and backwards, bucket by bucket; within each,
gathers one bucket ahead; and for each of the four moments at which data moves a stream, on which collective follows
collective from hop to hop. All ranks do the same at the same time, so one stands for all.

Shared resources serve in order of arrival: the processors of the machine, and the links of each level. A hop takes both
at once, as emulated links queue messages while the processors go on; then its latency passes, in which others may use
them. Nothing else decides what runs beside what. Simpler than the engine: the rounds of a ring are one, and quantising runs
beside the messages of its own hop (docs/log.md has both tried).
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from repro.comm import Route
from repro.comm.route import most_under_way
from repro.scaling import collectives
from repro.scaling.assumptions import Assumptions
from repro.scaling.hops import hop_seconds, level_seconds
from repro.scaling.machines import Machine
from repro.scaling.network import Value
from repro.zero import Plan, traffic
from repro.zero.layout import BucketLayout, Layout, shard_numel
from repro.zero.traffic import Collective

PROCESSORS = "processors"
Uses = Mapping[str, float]  # seconds, by resource: the processors, and levels of links


class HopCost(NamedTuple):
    """What a hop of a collective takes. `latency_s`: from its last use of a resource to its end."""

    uses: Uses
    latency_s: float


def step_seconds(
    plan: Plan,
    model: Layout,
    machine: Machine,
    accumulation: int,
    passes_s: Value,
    update_s: Value,
    assumed: Assumptions,
) -> float:
    """Seconds from one update to the next, in a row of steps.

    accumulation   backward passes per step
    passes_s       of the processors: all of its forwards and backwards, with the copies beside them
    update_s       of the processors: the optimizer's update
    assumed        what it says of messages; in which order they are sent is the engine's

    ValueError for a machine, or assumptions, in draws.
    """
    sent = {bucket: _messages(plan, bucket, machine, accumulation, assumed) for bucket in set(model.buckets)}
    program = _Program(plan, model, sent, _number(passes_s) / accumulation)
    levels = plan.levels(None, plan.optimizer)
    norm = _number(collectives.seconds("all_reduce", 4, machine.network, levels=levels)) if levels else 0.0
    updates = [program.step(accumulation, norm, _number(update_s)) for _ in range(2)]
    ends = program.tasks.ends()
    return ends[updates[1]] - ends[updates[0]]


@dataclass(frozen=True)
class _Messages:
    """The hops of a bucket's collectives, by moment; of two kinds of gathers, from the shards or the secondary ones."""

    gather: Sequence[HopCost]
    gather_secondary: Sequence[HopCost]
    reduce: Sequence[HopCost]
    average: Sequence[HopCost]
    publish: Sequence[HopCost]


def _messages(plan: Plan, bucket: BucketLayout, machine: Machine, accumulation: int, assumed: Assumptions) -> _Messages:
    moves, sent = plan.moves, list(traffic.collectives(plan, Layout((bucket,)), accumulation))

    def along(kind: traffic.Kind, *routes: Route | None) -> list[HopCost]:
        found = [each for each in sent if each.kind == kind and each.route in routes]
        return [hop for each in found for hop in _hops(each, machine, assumed)]

    across = (moves.reduce_to_optimizer, moves.all_reduce_replicas)
    return _Messages(
        gather=along("gather", moves.gather_weights),
        gather_secondary=along("gather", moves.gather_secondary),
        reduce=along("reduce", moves.reduce_to_weights, moves.reduce_to_gradients),
        average=along("reduce", *across) + along("gather", moves.all_reduce_replicas),
        publish=along("gather", moves.gather_updated),
    )


def _hops(collective: Collective, machine: Machine, assumed: Assumptions) -> list[HopCost]:
    """Of a collective. All that a rank sends leaves through its own link, the innermost."""
    found = []
    own, link = machine.topology.levels[0], machine.network.links[0]
    for hop in traffic.hops(collective, machine.topology):
        cost = hop_seconds(hop, machine, assumed)
        uses = level_seconds(hop, machine, assumed) | {PROCESSORS: cost.moving + cost.quantize}
        if own.size > 1:
            all_to_all = hop.kind == "reduce" and hop.bits < 16
            share = assumed.all_to_all if all_to_all else 1.0
            uses[own.name] = (hop.ranks - 1) * hop.payload / link.protocol(hop.payload).bytes_per_s / share
        found.append(HopCost({what: _number(lasts) for what, lasts in uses.items()}, _number(cost.latency)))
    return found


def _number(value: Value) -> float:
    if np.ndim(value):
        raise ValueError(
            f"a step on an emulated network takes a number for each parameter, found {np.size(value)} draws"
        )
    return float(value)


class _Program:
    """What a rank does, as tasks: the last one of the program itself is `now`."""

    def __init__(self, plan: Plan, model: Layout, sent: Mapping[BucketLayout, _Messages], pass_s: float) -> None:
        self.tasks = _Tasks()
        self.now = self.tasks.add([])
        self.sent = [sent[bucket] for bucket in model.buckets]
        numel = [shard_numel(bucket.trainable + bucket.frozen, 1) for bucket in model.buckets]
        self.forward_s = [pass_s / 3 * each / sum(numel) for each in numel]  # a backward takes twice as long
        self.secondary = plan.has_secondary
        moves, self.at_once = plan.moves, plan.reduce_across == "micro_batch"
        across = (moves.reduce_to_optimizer, moves.all_reduce_replicas)

        def stream(*routes: Route | None) -> _Stream:
            return _Stream(self.tasks, most_under_way(plan.topology, *routes))

        self.gathers = stream(moves.gather_weights, moves.gather_secondary)
        both = (moves.reduce_to_weights, moves.reduce_to_gradients)
        self.reductions = stream(*both, *(across if self.at_once else ()))
        self.averages = stream(*(() if self.at_once else across))
        self.publications = stream(moves.gather_updated)
        self.published: dict[int, int] = {}  # by bucket, when its new weights are there
        *self.blocks, self.root = range(len(self.sent))

    def step(self, accumulation: int, norm_s: float, update_s: float) -> int:
        """Number of the task that is its update. `norm_s`: of the all-reduce of the gradients' norm before it."""
        for number in range(1, accumulation + 1):
            self._forward(number == 1)
            self._backward(number == accumulation)
        streams = (self.gathers, self.reductions, self.averages, self.publications)
        under_way = [stream.ends[-1][-1] for stream in streams if stream.ends]
        norm = self.tasks.add([self.now, *under_way], {}, norm_s)
        self.now = self.tasks.add([norm], {PROCESSORS: update_s})
        for bucket in (self.root, *self.blocks):
            self.published[bucket] = self.publications.start([self.now], self.sent[bucket].publish)
        return self.now

    def _forward(self, first: bool) -> None:
        """Of the root what is asked for first, its weights, is needed last: the embeddings take next to no time.
        `first` of a step: then hpZ makes its secondary shards."""
        from_shards = first or not self.secondary
        for bucket in self._gathered([self.root, *self.blocks], from_shards):
            if bucket != self.root:
                self._compute(bucket, 1)
        self._compute(self.root, 1)

    def _backward(self, last: bool) -> None:
        """`last` of a step: then sums leave. The root's begins first and ends last."""
        for bucket in self._gathered([self.root, *reversed(self.blocks)], not self.secondary):
            self._compute(bucket, 2)
            if bucket != self.root:
                self._reduce(bucket, last)
        self._reduce(self.root, last)

    def _gathered(self, buckets: Sequence[int], from_shards: bool) -> Iterator[int]:
        """Each bucket, once its weights are there; FSDP asks for those of the next then, and not before."""
        arriving = self._gather(buckets[0], from_shards)
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            self.now = self.tasks.add([self.now, arriving])
            if following is not None:
                arriving = self._gather(following, from_shards)
            yield bucket

    def _gather(self, bucket: int, from_shards: bool) -> int:
        sent, new_weights = self.sent[bucket], self.published.get(bucket)
        after = [self.now, *([] if new_weights is None else [new_weights])]
        return self.gathers.start(after, sent.gather if from_shards else sent.gather_secondary)

    def _compute(self, bucket: int, times: int) -> None:
        """So many times a forward's work."""
        self.now = self.tasks.add([self.now], {PROCESSORS: times * self.forward_s[bucket]})

    def _reduce(self, bucket: int, last: bool) -> None:
        sent = self.sent[bucket]
        self.now = self.tasks.add([self.now, *self.reductions.room()])
        reduced = self.reductions.start([self.now], [*sent.reduce, *(sent.average if self.at_once else ())])
        if last and not self.at_once:
            self.averages.start([self.now, reduced], sent.average)


class _Stream:
    """Collectives of one moment (`comm.pending.Stream`): each begins a hop when the one before it has ended that hop, and
    at most `most` are under way. `ends`: of each collective, the tasks that are its hops."""

    def __init__(self, tasks: "_Tasks", most: int) -> None:
        self.tasks, self.most = tasks, most
        self.ends: list[list[int]] = []

    def room(self) -> list[int]:
        """What must have ended before another can start."""
        return [self.ends[-self.most][-1]] if len(self.ends) >= self.most else []

    def start(self, after: Iterable[int], hops: Sequence[HopCost]) -> int:
        """The task with which the collective ends."""
        if not hops:  # nothing to send: it takes no part
            return self.tasks.add([*after])
        ahead = self.ends[-1] if self.ends else []
        before = [*after, *self.room()]
        mine: list[int] = []
        for number, each in enumerate(hops):
            behind = ahead[min(number, len(ahead) - 1) :][:1]
            mine.append(self.tasks.add([*before, *behind], *each))
            before = mine[-1:]
        self.ends.append(mine)
        return mine[-1]


@dataclass
class _Tasks:
    """What is to be done: after which others, and as in `HopCost`."""

    after: list[list[int]] = field(default_factory=list)
    uses: list[Uses] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)

    def add(self, after: list[int], uses: Uses | None = None, latency_s: float = 0.0) -> int:
        self.after.append(after)
        self.uses.append(uses or {})
        self.latency_s.append(latency_s)
        return len(self.uses) - 1

    def ends(self) -> list[float]:
        """When each has ended, where whoever is ready first is served first."""
        missing, followers = [len(others) for others in self.after], defaultdict(list)
        for number, others in enumerate(self.after):
            for each in others:
                followers[each].append(number)
        ready = [(0.0, number) for number, count in enumerate(missing) if not count]
        free: defaultdict[str, float] = defaultdict(float)
        ends = [0.0] * len(self.uses)
        while ready:
            start, number = heapq.heappop(ready)
            for what, seconds in self.uses[number].items():
                free[what] = max(free[what], start) + seconds
            used = max([start, *(free[what] for what in self.uses[number])])
            ends[number] = used + self.latency_s[number]
            for each in followers[number]:
                missing[each] -= 1
                if not missing[each]:
                    heapq.heappush(ready, (max(ends[other] for other in self.after[each]), each))
        return ends
