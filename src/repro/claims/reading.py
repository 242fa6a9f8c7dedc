"""Our value of a claim, read from run records by a declarative `Reading` (the `value:` of `config/claims.yaml`).

Runs that differ only in repeat and seed are repeats of one configuration. Groups (two sides of a ratio, the steps of a
sequence) are compared inside one configuration and one evidence kind, repeat by repeat; nothing is ever mixed. Which
repeats count is said before the runs, and further ones are not read: so no verdict can be had by running until it comes.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from repro.claims.filters import Filters, accepts, matches, words
from repro.records import statistics
from repro.records.record import Evidence, Record, Strict

Sampled = Literal["once", "occasions", "seeds", "sequences"]
OCCASIONS = 3  # that a timed number needs at least
_RUNS: dict[Sampled, int] = {"once": 1, "occasions": 6, "seeds": 3, "sequences": 1}
_STRONGEST_FIRST: tuple[Evidence, ...] = get_args(Evidence)
Runs = Mapping[Path, Record]


class Reading(Strict):
    """Which number of which runs.

    The value of a run is `factor` · `metric` ÷ `per` (a metric or point field), or 1 minus that (`complement`).
    Of the runs that match `where`, the claim's value is
    - that value, where nothing more is given;
    - with `banded`: that value; its interval is the run's own `<metric>_low` and `<metric>_high`, a prediction's band;
    - with `over`: its ratio to the value of the runs that match `where` changed by `over`;
      with `form: reduction` as well: 1 − that ratio;
    - with `sequence` and `expect`: one group of runs per entry, `where` changed by it; they increase or decrease.
      The value is the ratio of a step in that direction: the smallest for an ordering, first to last for a trend.
    A field that `over` or `sequence` names, or whose filter is {}, may differ between the groups; no other may. One that
    no filter names has its default, unless the runs are in the claim's scope.

    `sampled` says what another run would change, and so what the interval is of:
    - once: nothing (bytes, counts, models). One run, and no interval but a band;
    - occasions: the state of the machine. `runs` pairs, repeats 0, 1, ..., on `OCCASIONS` occasions or more; the
      t-interval of the means of occasions, of logarithms where it is a ratio;
    - seeds: what is drawn at random. Seeds 0 to `runs` - 1, and the t-interval of their mean;
    - sequences: which texts are routed. Resampled from the series of the runs, whose `columns` are the numerator and
      denominator of the metric, a row per sequence; both sides of a ratio together.
    """

    experiment: str
    metric: str
    per: str | None = None
    factor: float = 1.0
    complement: bool = False
    banded: bool = False
    where: Filters = Field(default_factory=dict)
    over: Filters | None = None
    form: Literal["ratio", "reduction"] = "ratio"
    sequence: list[Filters] | None = Field(None, min_length=2)
    expect: Literal["increasing", "decreasing"] | None = None
    sampled: Sampled = "once"
    runs: int | None = Field(None, ge=1)
    columns: tuple[str, str] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Reading":
        if (self.sampled == "sequences") != (self.columns is not None):
            raise ValueError("sampled: sequences and columns (numerator and denominator) belong together")
        if self.banded and self.sampled != "once":
            raise ValueError("banded reads one run's band: sampled once")
        if self.over is not None and self.sequence is not None:
            raise ValueError("over and sequence exclude each other")
        if (self.sequence is None) != (self.expect is None):
            raise ValueError("sequence and expect (increasing or decreasing) belong together")
        if self.form == "reduction" and self.over is None:
            raise ValueError("form: reduction needs over")
        if self.banded and (self.over is not None or self.sequence is not None or self.per is not None):
            raise ValueError("banded reads one number with its band: no over, sequence or per")
        return self

    def band(self, run: Record) -> tuple[float, float]:
        """The run's band around the metric, as `factor` and `complement` make it."""
        ends = [run.metrics[name].value * self.factor for name in self.metrics[1:]]
        low, high = sorted(1 - end if self.complement else end for end in ends)
        return low, high

    @property
    def metrics(self) -> list[str]:
        """Names of those that a run must have."""
        return [self.metric, *([f"{self.metric}_low", f"{self.metric}_high"] if self.banded else [])]

    @property
    def needed(self) -> int:
        """How many runs, or pairs of runs, a verdict takes."""
        return self.runs or _RUNS[self.sampled]

    def counts(self, run: Record) -> bool:
        """Whether the run's repeat and seed are among those that a verdict takes."""
        by_seed = self.sampled in ("seeds", "sequences")
        number, other = (run.seed, run.repeat) if by_seed else (run.repeat, run.seed)
        return number < self.needed and (other == 0 or "seed" in self.where)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Filters of each group."""
        changes = self.sequence or ([{}] if self.over is None else [{}, self.over])
        return [self.where | change for change in changes]

    def configuration(self, run: Record) -> tuple[tuple[str, Any], ...]:
        """Point fields that must be the same in all groups and repeats."""
        free = {name for change in [self.over or {}, *(self.sequence or [])] for name in change} | {"seed"}
        free |= {name for name, wanted in self.where.items() if wanted == {}}
        return tuple(sorted((name, value) for name, value in run.point.items() if name not in free))

    def of_run(self, run: Record) -> float | None:
        """The value of one run; None when it is not ok, lacks the metric or its band, or gives no finite number."""
        if run.status != "ok" or not run.metrics.keys() >= set(self.metrics):
            return None
        value = run.metrics[self.metric].value * self.factor
        if self.per is not None:
            divisor = run.facts.get(self.per)
            if not isinstance(divisor, int | float) or divisor == 0:
                return None
            value /= divisor
        return _finite(1 - value if self.complement else value)

    def combine(self, values: list[float], ordering: bool) -> float | None:
        """One number from the values of the groups in one repeat; None where they give no finite one."""
        if len(values) == 1:
            return values[0]
        rising = values if self.expect == "increasing" else values[::-1]
        if 0 in rising[:-1]:
            return None
        steps = [later / earlier for earlier, later in itertools.pairwise(rising)]
        ratio = min(steps) if ordering else rising[-1] / rising[0]
        return _finite(1 - ratio if self.form == "reduction" else ratio)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Sample:
    """What the runs of one configuration say.

    values      one per run, or pair of runs, that counts
    occasions   number of the occasion of each
    interval    of the claim's value, in the middle of it; its ends are infinite where there is none
    complete    whether there are as many runs as a verdict takes
    said        how many these are, in words
    """

    values: list[float]
    occasions: list[int]
    value: float
    interval: tuple[float, float]
    complete: bool
    said: str
    evidence: Evidence
    configuration: dict[str, Any]
    runs: Runs
    remarks: list[str]


@dataclass(frozen=True)
class Nothing:
    """Why there is no value; `runs` are the failed or skipped ones."""

    agreement: Literal["skipped", "not run"]
    reason: str
    runs: Runs = field(default_factory=dict)


def read(
    reading: Reading,
    records: Runs,
    in_scope: Callable[[Record], bool],
    ordering: bool = False,
    defaults: Mapping[str, Any] | None = None,
) -> Sample | Nothing:
    """Our value, from one configuration that has a run in every group.

    Of several: one in scope, else of the stronger evidence kind, else the first by file name. `defaults`: what a field
    that no filter names must be, outside the scope. `ordering` takes the smallest step of a sequence instead of first
    to last.
    """
    runs = {path: run for path, run in sorted(records.items()) if run.experiment == reading.experiment}
    groups = [{path: run for path, run in runs.items() if matches(run, filters)} for filters in reading.groups]
    if nothing := _nothing(reading, runs, groups):
        return nothing
    compared = [run for path, run in runs.items() if any(path in group for group in groups)]
    cells = dict.fromkeys((run.evidence, reading.configuration(run)) for run in compared if run.status == "ok")
    found = [sample for cell in cells if (sample := _sample(reading, groups, *cell, ordering))]

    def covered(sample: Sample) -> bool:
        return all(in_scope(run) for run in sample.runs.values())

    asked = {name for group in reading.groups for name in group}
    usual = {name: value for name, value in (defaults or {}).items() if name not in asked}
    samples = [s for s in found if covered(s) or not _unusual(s.configuration, usual)]
    if not samples:
        if found:
            words_of = words(_unusual(found[0].configuration, usual))
            return Nothing("not run", f"only runs with other settings than the claim's: {words_of}")
        sides = f"no runs that differ only in what is compared ({'; '.join(map(words, reading.groups))})"
        return Nothing("not run", f"{sides}, or their ratio is no finite number")
    best = min(samples, key=lambda s: (not covered(s), _STRONGEST_FIRST.index(s.evidence)))
    if len(samples) > 1:
        best.remarks.append(f"{len(samples) - 1} other configurations or evidence kinds were not read")
    return best


def _unusual(configuration: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in configuration.items() if k in usual and not accepts(usual[k], v)}


def _sample(
    reading: Reading, groups: list[Runs], evidence: Evidence, configuration: tuple, ordering: bool
) -> Sample | None:
    """What the repeats say that every group has of one evidence kind and configuration; None when there is none."""
    alike = [{p: run for p, run in group.items() if reading.configuration(run) == configuration} for group in groups]
    usable = [
        {
            (run.repeat, run.seed): (path, run)
            for path, run in reversed(group.items())
            if _usable(reading, run, evidence)
        }
        for group in alike
    ]
    common = sorted(set.intersection(*map(set, usable)))
    taken = [[group[key] for group in usable] for key in common]
    if reading.sampled == "occasions":
        taken = list(filter(_together, taken))
    pairs = [(reading.combine([reading.of_run(run) for _, run in found], ordering), found) for found in taken]
    pairs = [(value, found) for value, found in pairs if value is not None]
    if not pairs:
        return None
    values = [value for value, _ in pairs]
    occasions = statistics.occasions([found[0][1].provenance.start for _, found in pairs])
    runs = {path: run for _, found in pairs for path, run in found}
    value, interval = _interval(reading, values, occasions, pairs)
    many = len(set(occasions))
    complete = len(values) >= reading.needed and (reading.sampled != "occasions" or many >= OCCASIONS)
    return Sample(
        values,
        occasions,
        value,
        interval,
        complete and all(map(math.isfinite, interval)),
        _said(reading, len(values), many),
        evidence,
        dict(configuration),
        runs,
        _remarks(alike, sum(len(group) for group in usable) - len(runs)),
    )


def _usable(reading: Reading, run: Record, evidence: Evidence) -> bool:
    return run.evidence == evidence and reading.counts(run) and reading.of_run(run) is not None


def _together(found: Sequence[tuple[Path, Record]]) -> bool:
    """Whether runs are of one occasion, as a comparison of times must be."""
    return len(set(statistics.occasions([run.provenance.start for _, run in found]))) == 1


def _interval(
    reading: Reading,
    values: list[float],
    occasions: list[int],
    pairs: Sequence[tuple[float, list[tuple[Path, Record]]]],
) -> tuple[float, tuple[float, float]]:
    """The claim's value, and its interval as `Reading.sampled` says."""
    if reading.banded:
        low, high = reading.band(pairs[0][1][0][1])
        return values[0], (low, high)
    if reading.sampled == "once":
        return values[0], (values[0], values[0])
    if reading.columns is not None:
        from repro.experiments.common import sequences  # pandas

        sides = [[found[side][0] for _, found in pairs] for side in range(len(reading.groups))]
        value, low, high = sequences.ratio(sides, *reading.columns, reading.complement)
        return (1 - value, (1 - high, 1 - low)) if reading.form == "reduction" else (value, (low, high))
    scale = scale_of(reading, values)
    value, low, high = statistics.mean_interval(scale.means(values, occasions))
    low, high = sorted((scale.back(low), scale.back(high)))
    return scale.back(value), (low, high)


@dataclass(frozen=True)
class Scale:
    """Where values are averaged: `to` takes a value there and `back` from there."""

    to: Callable[[float], float]
    back: Callable[[float], float]
    by_occasion: bool

    def means(self, values: Sequence[float], occasions: Sequence[int]) -> list[float]:
        """Independent values: of each occasion the mean; or each value."""
        there = [self.to(value) for value in values]
        if not self.by_occasion:
            return there
        each = [[v for v, o in zip(there, occasions, strict=True) if o == number] for number in sorted(set(occasions))]
        return [sum(group) / len(group) for group in each]


def scale_of(reading: Reading, values: Sequence[float]) -> Scale:
    """Logarithms for a ratio, and of 1 - value for a reduction; else values as they are."""
    ratio, by_occasion = reading.over is not None or reading.sequence is not None, reading.sampled == "occasions"
    reduction = reading.form == "reduction"
    if not ratio or min(1 - value if reduction else value for value in values) <= 0:
        return Scale(lambda value: value, lambda value: value, by_occasion)
    if reduction:
        return Scale(lambda value: math.log(1 - value), lambda there: 1 - _exp(there), by_occasion)
    return Scale(math.log, _exp, by_occasion)


def _exp(there: float) -> float:
    return math.exp(there) if there < 700 else math.inf


def _said(reading: Reading, found: int, occasions: int) -> str:
    """How many runs there are, and how many a verdict takes where they are fewer."""
    if reading.banded:
        return "a prediction with its band"
    if reading.sampled == "once":
        return "one run"
    if reading.sampled == "sequences":
        return "resampled by sequences" + (f", {found} of {reading.needed} seeds" if reading.needed > 1 else "")
    if reading.sampled == "seeds":
        return f"{found} of {reading.needed} seeds"
    what = "runs" if reading.over is None and reading.sequence is None else "interleaved pairs"
    many = "1 occasion" if occasions == 1 else f"{occasions} occasions"
    return f"{found} of {reading.needed} {what}, on {many}" + (f" of {OCCASIONS}" if occasions < OCCASIONS else "")


def _remarks(alike: list[Runs], alone: int) -> list[str]:
    mine = {path: run for group in alike for path, run in group.items()}
    found = []
    for status in ("failed", "skipped"):
        if bad := [run for run in mine.values() if run.status == status]:
            kinds = ", ".join(sorted({str(run.cause) for run in bad}))
            found.append(f"{status}: {kinds} ({len(bad)} of {len(mine)} runs)")
    if alone:
        found.append(f"{alone} runs have no partner of the same repeat and occasion")
    return found


def _nothing(reading: Reading, runs: Runs, groups: list[Runs]) -> Nothing | None:
    """Why some group has no usable run; None when all have one. `runs`: all of the experiment."""
    if not runs:
        return Nothing("not run", f"no record of {reading.experiment}")
    for filters, found in zip(reading.groups, groups, strict=True):
        if any(reading.of_run(run) is not None for run in found.values()):
            continue
        bad = {path: run for path, run in found.items() if run.status != "ok"}
        failed = {path: run for path, run in bad.items() if run.status == "failed"}
        if len(bad) < len(found):
            what = ", ".join(reading.metrics) + (f" per {reading.per}" if reading.per else "")
            return Nothing("not run", f"the records with {words(filters)} give no {what}")
        if failed:
            return Nothing("not run", f"failed: {_causes(failed)}, {len(failed)} of {len(found)} runs", bad)
        if bad:
            return Nothing("skipped", f"skipped: {_causes(bad)}", bad)
        reason = f"no record of {reading.experiment} with {words(filters)}"
        return Nothing("not run", reason + _hint(filters, runs))
    return None


def _causes(runs: Runs) -> str:
    """`oom (2), timeout (1)`, and the last line of the first detail."""
    counts = Counter(str(run.cause) for run in runs.values())
    details = [run.detail.strip().splitlines()[-1] for run in runs.values() if run.detail.strip()]
    text = ", ".join(f"{cause} ({count})" for cause, count in sorted(counts.items()))
    return text + (f": {details[0][:160]}" if details else "")


def _hint(filters: Mapping[str, Any], runs: Runs) -> str:
    """The first filter that alone refuses runs which pass all others, and what those have instead."""
    for name, wanted in filters.items():
        others = {key: value for key, value in filters.items() if key != name}
        near = [run.facts.get(name) for run in runs.values() if matches(run, others)]
        if near and not any(accepts(wanted, value) for value in near):
            return f" (there {name} is {', '.join(sorted(set(map(str, near)))[:4])})"
    return ""
