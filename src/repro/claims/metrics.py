"""The metrics of points that two folders of records both hold: the part of a comparison that asks for no claim.

What a run counts or computes is to be the same, record by record. What the machine's state changes, such as times, or bytes
moved for requests that arrive in time, is compared by points: the mean of A's runs with what B's occasions allow, if both
ran on the same kind of machine. Of hundreds of numbers some lie outside an interval of 95 % by chance, so these intervals are
so wide that *all* of them hold 19 times in 20.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro import experiments
from repro.claims.interval import LOGARITHMS, PLAIN
from repro.claims.registry import CLOCK
from repro.claims.sample import machines
from repro.claims.sides import SAME, Row, Side, Told, between, other_code, same, time_limited, untold
from repro.experiments import stored
from repro.records import statistics
from repro.records.record import Record

_ROUNDING = 1e-9
WHOLE = "all metrics"  # of two records that cannot be compared
# Occasions. Two are too few: their interval, widened to hold together with hundreds of others, allows almost anything.
LEAST = 3


@dataclass(frozen=True)
class Pair:
    """The runs of one point and repeat in A and B. `name`: A's record."""

    name: str
    a: Record
    b: Record

    def values(self, metric: str) -> tuple[float | None, float | None]:
        a, b = (run.metrics[metric].value if metric in run.metrics else None for run in (self.a, self.b))
        return a, b

    def unit(self, metric: str) -> str:
        return next(run.metrics[metric].unit for run in (self.a, self.b) if metric in run.metrics)


def compare(a: Side, b: Side) -> tuple[list[Row], list[str], list[str]]:
    """Rows of the points that both hold, then the records of points that only A has, and only B."""
    ours, theirs = ({stored.place(run): path for path, run in side.records.items()} for side in (a, b))
    rows, clocked, changing = [], defaultdict(list), _changing(b.records.values())
    for place in sorted(ours.keys() & theirs.keys(), key=repr):
        pair = Pair(_name(ours[place]), a.records[ours[place]], b.records[theirs[place]])
        if told := _apart(pair, a, b):
            rows.append(Row(**vars(told), name=pair.name, title=WHOLE, unit="", a=None, b=None))
            continue
        for metric in pair.a.metrics.keys() | pair.b.metrics.keys():
            if None not in pair.values(metric) and _by_a_clock(pair, metric, changing):
                clocked[stored.point(pair.a), _kind(pair.b), metric].append(pair)
            else:
                rows.append(_counted(pair, metric, a, b))
    rows += _timed(clocked, b)
    only_a, only_b = ([_name(x[at]) for at in x if at not in y] for x, y in ((ours, theirs), (theirs, ours)))
    return sorted(rows, key=lambda row: (row.name, row.title)), only_a, only_b


def _kind(run: Record) -> Any:
    """The same for runs whose times can be put together."""
    return run.evidence, tuple(sorted(run.conditions.items()))


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}"


def _apart(pair: Pair, a: Side, b: Side) -> Told | None:
    """Why no metric of two runs of one point can be compared."""
    sides = ((a.name, pair.a), (b.name, pair.b))
    if any(run.status != "ok" for _, run in sides):
        return untold("no numbers", ", ".join(f"{name} {run.status} {run.cause or ''}".strip() for name, run in sides))
    if pair.a.evidence != pair.b.evidence:
        return untold("other evidence", ", ".join(f"{name} {run.evidence}" for name, run in sides))
    apart = sorted({key for key, _ in pair.a.conditions.items() ^ pair.b.conditions.items()})
    found = [f"{key}: {', '.join(f'{name} {run.conditions.get(key)}' for name, run in sides)}" for key in apart]
    return untold("other conditions", "; ".join(found)) if found else None


def _changing(runs: Iterable[Record]) -> dict[tuple[str, str], bool]:
    """For the metrics of points that were run more than once: whether they ever differed between repeats."""
    first: dict[Any, Record] = {}
    found: dict[tuple[str, str], bool] = {}
    for run in runs:
        other = first.setdefault((stored.point(run), run.evidence), run)
        for name in (run.metrics.keys() & other.metrics) if other is not run else ():
            same_value = math.isclose(run.metrics[name].value, other.metrics[name].value, rel_tol=_ROUNDING)
            found[run.experiment, name] = found.get((run.experiment, name), False) or not same_value
    return found


def _by_a_clock(pair: Pair, metric: str, changing: Mapping[tuple[str, str], bool]) -> bool:
    """Whether the machine's state may change it: always in a search that stopped when its seconds were up; in a timed experiment by its unit, and unless repeats
    never differ in it; else by its unit, unless it is modelled."""
    run = pair.a
    if time_limited(run):
        return True
    if experiments.get(run.experiment).timed:
        return pair.unit(metric) in CLOCK or changing.get((run.experiment, metric), True)
    return pair.unit(metric) in CLOCK and run.evidence != "modelled"


def _counted(pair: Pair, metric: str, a: Side, b: Side) -> Row:
    ours, theirs = pair.values(metric)
    if ours is None or theirs is None:
        told = untold("no value", f"{metric} is not in {a.name if ours is None else b.name}")
    else:
        told = other_code(same(ours, theirs), [pair.a], [pair.b])
    return Row(**vars(told), name=pair.name, title=metric, unit=pair.unit(metric), a=ours, b=theirs)


def _timed(clocked: Mapping[tuple[Any, Any, str], list[Pair]], b: Side) -> list[Row]:
    """A row for each point and metric, named after the record that is farthest from its partner."""
    alike = defaultdict(list)
    for run in b.records.values():
        alike[stored.point(run)].append(run)
    spreads = [_Spread(metric, pairs, alike[point]) for (point, _, metric), pairs in clocked.items()]
    reasons = [spread.why_not(b.name) for spread in spreads]
    level = statistics.LEVEL ** (1 / max(1, reasons.count(None)))
    return [spread.row(told or spread.told(level)) for spread, told in zip(spreads, reasons, strict=True)]


class _Spread:
    """A clock's metric of one point: its values on occasions of A and of B, as logarithms where it is positive."""

    def __init__(self, metric: str, pairs: list[Pair], alike: list[Record]) -> None:
        kind = _kind(pairs[0].b)
        self.metric, self.pairs = metric, pairs
        self.ours = [pair.a for pair in pairs]
        self.theirs = [run for run in alike if metric in run.metrics and _kind(run) == kind]
        positive = all(run.metrics[metric].value > 0 for run in [*self.ours, *self.theirs])
        self.scale = LOGARITHMS if positive else PLAIN

    def groups(self, runs: list[Record]) -> list[list[float]]:
        """The values of each occasion, on the scale."""
        values = [run.metrics[self.metric].value for run in runs]
        return self.scale.groups(values, statistics.occasions([run.provenance.start for run in runs]))

    def middle(self, runs: list[Record]) -> float:
        return self.scale.back(statistics.mean_interval(self.groups(runs))[0])

    def why_not(self, name: str) -> Told | None:
        """What is known without an interval; None where it takes one."""
        if all(a == b for a, b in self.values):
            return other_code(Told(None, True, "the same value"), self.ours, self.theirs)
        if not experiments.get(self.ours[0].experiment).timed:
            return untold("not timed", "it depends on seconds, and other points ran beside it")
        mine, other = machines(self.ours, self.theirs)
        if mine != other:
            return untold("other machine", "times are compared on machines of one kind")
        groups = self.groups(self.theirs)
        if len(groups) < LEAST:
            return untold("too few runs", f"{name} has {len(groups)} of {LEAST} occasions of this point")
        alike = len({value for group in groups for value in group}) == 1
        if alike and self.middle(self.ours) != self.middle(self.theirs):
            return untold("too few runs", f"all of {name} are alike here, and those of other points are not")
        return None

    @property
    def values(self) -> list[tuple[float, float]]:
        """Of A's run and B's, repeat by repeat."""
        return [(pair.a.metrics[self.metric].value, pair.b.metrics[self.metric].value) for pair in self.pairs]

    def told(self, level: float) -> Told:
        further = len(self.groups(self.ours))
        low, high = map(self.scale.back, statistics.prediction_interval(self.groups(self.theirs), further, level))
        ends = (low - SAME * abs(low), high + SAME * abs(high))
        found = between(self.middle(self.ours), ends, "all times lie together 19 times in 20")
        return other_code(found, self.ours, self.theirs)

    def row(self, told: Told) -> Row:
        apart = [abs(a / b - 1) if b else abs(a) for a, b in self.values]
        name, unit = self.pairs[apart.index(max(apart))].name, self.pairs[0].unit(self.metric)
        a, b = self.middle(self.ours), self.middle(self.theirs)
        return Row(**vars(told), name=name, title=self.metric, unit=unit, a=a, b=b, timed=True)
