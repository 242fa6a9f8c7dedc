"""A step of this package's engine on an emulated network, message by message.

What is simulated is the engine's program (`repro.zero.engine`): forwards and backwards, bucket by bucket; gathers one
bucket ahead; and for each of the four moments at which data moves a stream, on which collective follows collective from
hop to hop. All ranks do the same at the same time, so one stands for all.

What they share serves who comes first: the processors of the machine, and the links of each level. A hop takes both at
once, as emulated links queue messages while the processors go on; then its latency passes, in which others may use them.
Nothing else decides what runs beside what.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from repro.comm import Route
from repro.comm.route import most_under_way
from repro.scaling.assumptions import Assumptions
from repro.scaling.hops import hop_seconds, level_seconds, restoring
from repro.scaling.machines import Machine
from repro.scaling.network import Value
from repro.zero import Plan, traffic
from repro.zero.layout import BucketLayout, Layout, shard_numel
from repro.zero.traffic import Collective

PROCESSORS = "processors"
Uses = Mapping[str, float]  # seconds, by what is used: the processors, and levels of links


class Hop(NamedTuple):
    """What a hop of a collective uses, and what passes then until it has ended."""

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
    """Seconds of a step among others.

    accumulation   backward passes per step
    passes_s       of the processors: all of its forwards and backwards, with the copies beside them
    update_s       of the processors: the optimizer's update
    assumed        what it says of messages; in which order they are sent is the engine's

    ValueError for a machine, or assumptions, in draws.
    """
    sent = {bucket: _sent(plan, bucket, machine, accumulation, assumed) for bucket in set(model.buckets)}
    program = _Program(plan, model, sent, _number(passes_s) / accumulation, _number(update_s))
    updates = [program.step(accumulation) for _ in range(2)]
    ends = program.tasks.ends()
    return ends[updates[1]] - ends[updates[0]]


@dataclass(frozen=True)
class _Sent:
    """The hops of a bucket's collectives, by moment; `refill` is a gather from the secondary shards."""

    gather: Sequence[Hop]
    refill: Sequence[Hop]
    reduce: Sequence[Hop]
    average: Sequence[Hop]
    publish: Sequence[Hop]


def _sent(plan: Plan, bucket: BucketLayout, machine: Machine, accumulation: int, assumed: Assumptions) -> _Sent:
    moves, collectives = plan.moves, list(traffic.collectives(plan, Layout((bucket,)), accumulation))

    def along(kind: traffic.Kind, *routes: Route | None) -> list[Hop]:
        found = [each for each in collectives if each.kind == kind and each.route in routes]
        return [hop for each in found for hop in _hops(each, machine, assumed)]

    across = (moves.reduce_to_optimizer, moves.all_reduce_replicas)
    return _Sent(
        gather=along("gather", moves.gather_weights),
        refill=along("gather", moves.gather_secondary),
        reduce=along("reduce", moves.reduce_to_weights, moves.reduce_to_gradients),
        average=along("reduce", *across) + along("gather", moves.all_reduce_replicas),
        publish=along("gather", moves.gather_updated),
    )


def _hops(collective: Collective, machine: Machine, assumed: Assumptions) -> list[Hop]:
    """Of a collective. All that a rank sends leaves through its own link, the innermost."""
    found = []
    own, links = machine.topology.levels[0], machine.network.links[0]
    for hop, restored in restoring(collective, machine.topology):
        cost = hop_seconds(hop, restored, machine, assumed)
        uses = level_seconds(hop, machine, assumed) | {PROCESSORS: cost.moving + cost.quantize}
        if own.size > 1:
            uses[own.name] = (hop.ranks - 1) * hop.payload / links.protocol(hop.payload).bytes_per_s
        found.append(Hop({what: _number(seconds) for what, seconds in uses.items()}, _number(cost.latency)))
    return found


def _number(value: Value) -> float:
    if np.ndim(value):
        raise ValueError(
            f"a step on an emulated network takes a number for each parameter, found {np.size(value)} draws"
        )
    return float(value)


class _Program:
    """What a rank does, as tasks: the last one of the program itself is `now`."""

    def __init__(
        self, plan: Plan, model: Layout, sent: Mapping[BucketLayout, _Sent], pass_s: float, update_s: float
    ) -> None:
        self.tasks = _Tasks()
        self.now = self.tasks.add([])
        self.sent = [sent[bucket] for bucket in model.buckets]
        numel = [shard_numel(bucket.trainable + bucket.frozen, 1) for bucket in model.buckets]
        self.forward_s = [pass_s / 3 * each / sum(numel) for each in numel]  # a backward takes twice as long
        self.update_s, self.secondary = update_s, plan.has_secondary
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

    def step(self, accumulation: int) -> int:
        """Number of the task that is its update."""
        for number in range(1, accumulation + 1):
            self._passes(number == 1, number == accumulation)
        streams = (self.gathers, self.reductions, self.averages, self.publications)
        under_way = [stream.ends[-1][-1] for stream in streams if stream.ends]
        self.now = self.tasks.add([self.now, *under_way], {PROCESSORS: self.update_s})
        for bucket in (self.root, *self.blocks):
            self.published[bucket] = self.publications.start([self.now], self.sent[bucket].publish)
        return self.now

    def _passes(self, first: bool, last: bool) -> None:
        """A forward and a backward, the `first` or `last` of a step or not. The root's come first in both, the end of its
        backward last."""
        visits = [(bucket, False) for bucket in (self.root, *self.blocks)]
        visits += [(bucket, True) for bucket in (self.root, *reversed(self.blocks))]
        gathered = self._gather(*visits[0], first)
        for (bucket, backward), following in zip(visits, [*visits[1:], None], strict=True):
            self.now = self.tasks.add([self.now, gathered])
            if following:  # FSDP asks for the next bucket's weights once it has this one's
                gathered = self._gather(*following, first)
            seconds = self.forward_s[bucket] * (2 if backward else 1)
            self.now = self.tasks.add([self.now], {PROCESSORS: seconds})
            if backward and bucket != self.root:
                self._reduce(self.sent[bucket], last)
        self._reduce(self.sent[self.root], last)

    def _gather(self, bucket: int, backward: bool, first: bool) -> int:
        anew = not self.secondary or (first and not backward)  # the secondary shards are made in the first forward
        sent, new_weights = self.sent[bucket], self.published.get(bucket)
        after = [self.now, *([] if new_weights is None else [new_weights])]
        return self.gathers.start(after, sent.gather if anew else sent.refill)

    def _reduce(self, sent: _Sent, last: bool) -> None:
        self.now = self.tasks.add([self.now, *self.reductions.room()])
        hops = [*sent.reduce, *(sent.average if self.at_once else ())]
        reduced = self.reductions.start([self.now], hops)
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

    def start(self, after: Iterable[int], hops: Sequence[Hop]) -> int:
        """The task with which the collective ends."""
        ahead = self.ends[-1] if self.ends else []
        before = [*after, *self.room()]
        mine: list[int] = []
        for number, hop in enumerate(hops or [Hop({}, 0.0)]):
            behind = ahead[min(number, len(ahead) - 1) :][:1]
            mine.append(self.tasks.add([*before, *behind], *hop))
            before = mine[-1:]
        self.ends.append(mine)
        return mine[-1]


@dataclass
class _Tasks:
    """What is to be done: after which others, what it uses for how long, and what passes then until it has ended."""

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
