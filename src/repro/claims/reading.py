"""Our value of a claim, read from run records by a declarative `Reading` (the `value:` of `config/claims.yaml`).

Runs that differ only in repeat and seed are repeats of one configuration. Groups (two sides of a ratio, the steps of a
sequence) are compared inside one configuration and one evidence kind, repeat by repeat; nothing is ever mixed.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from repro.claims.filters import Filters, accepts, matches, words
from repro.records.record import Evidence, Record, Strict

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
    A field that `over` or `sequence` names, or whose filter is {}, may differ between the groups; no other may.
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

    @model_validator(mode="after")
    def _consistent(self) -> "Reading":
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
    """Values of one configuration, one per repeat, the runs they come from, and remarks for the reader."""

    values: list[float]
    evidence: Evidence
    configuration: dict[str, Any]
    runs: Runs
    remarks: list[str]


@dataclass(frozen=True)
class Nothing:
    """Why there is no value; `runs` are the failed or skipped ones."""

    verdict: Literal["skipped", "not run"]
    reason: str
    runs: Runs = field(default_factory=dict)


def read(
    reading: Reading, records: Runs, in_scope: Callable[[Record], bool], ordering: bool = False
) -> Sample | Nothing:
    """Our value, from one configuration that has a run in every group.

    Of several: one in scope, else of the stronger evidence kind, else with more repeats.
    `ordering` takes the smallest step of a sequence instead of first to last.
    """
    runs = {path: run for path, run in sorted(records.items()) if run.experiment == reading.experiment}
    groups = [{path: run for path, run in runs.items() if matches(run, filters)} for filters in reading.groups]
    if nothing := _nothing(reading, runs, groups):
        return nothing
    compared = [run for path, run in runs.items() if any(path in group for group in groups)]
    cells = dict.fromkeys((run.evidence, reading.configuration(run)) for run in compared if run.status == "ok")
    samples = [found for cell in cells if (found := _sample(reading, groups, *cell, ordering))]
    if not samples:
        sides = f"no runs that differ only in what is compared ({'; '.join(map(words, reading.groups))})"
        return Nothing("not run", f"{sides}, or their ratio is no finite number")

    def rank(sample: Sample) -> tuple[bool, int, int]:
        outside = not all(in_scope(run) for run in sample.runs.values())
        return outside, _STRONGEST_FIRST.index(sample.evidence), -len(sample.values)

    best = min(samples, key=rank)  # ties: the first in the order of file names
    if len(samples) > 1:
        others = [sample.configuration for sample in samples if sample is not best]
        differs = {k: v for k, v in best.configuration.items() if any(other.get(k) != v for other in others)}
        read_at = f"read at {words(differs)}; " if differs else ""
        best.remarks.append(f"{read_at}{len(others)} other configurations or evidence kinds were not read")
    return best


def _sample(
    reading: Reading, groups: list[Runs], evidence: Evidence, configuration: tuple, ordering: bool
) -> Sample | None:
    """Values of the repeats that every group has of one evidence kind and configuration; None when there is none."""
    alike = [{p: run for p, run in group.items() if reading.configuration(run) == configuration} for group in groups]
    usable = [
        [(path, run) for path, run in group.items() if run.evidence == evidence and reading.of_run(run) is not None]
        for group in alike
    ]
    repeats = [{(run.repeat, run.seed): (path, run) for path, run in reversed(group)} for group in usable]  # the first
    common = sorted(set.intersection(*map(set, repeats)))
    taken = [[group[repeat] for group in repeats] for repeat in common]
    combined = [reading.combine([reading.of_run(run) for _, run in found], ordering) for found in taken]
    values = [value for value in combined if value is not None]
    if not values:
        return None
    mine = {path: run for group in alike for path, run in group.items()}
    remarks = []
    for status in ("failed", "skipped"):
        if bad := [run for run in mine.values() if run.status == status]:
            kinds = ", ".join(sorted({str(run.cause) for run in bad}))
            remarks.append(f"{status}: {kinds} ({len(bad)} of {len(mine)} runs)")
    if alone := sum(len(group) - len(common) for group in repeats):
        remarks.append(f"{alone} runs have no partner of the same repeat")
    if doubled := sum(map(len, usable)) - sum(map(len, repeats)):
        remarks.append(f"{doubled} further runs of the same repeat were not read")
    used = {path: run for found in taken for path, run in found}
    return Sample(values, evidence, dict(configuration), used, remarks)


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
