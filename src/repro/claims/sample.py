"""Our value of a claim, and the runs that it rests on.

Runs that differ only in repeat and seed are repeats of one configuration. Groups (two sides of a ratio, the steps of a
sequence) are compared inside one configuration and one evidence kind, repeat by repeat, and times of one machine, code
and occasion. Pairs by several versions of the code are put together, which is told.
Which repeats count is said before the runs, and further ones are not read: so no verdict can be had by running until
it comes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from repro.claims import interval
from repro.claims.filters import accepts, matches, words
from repro.claims.reading import Reading
from repro.records import statistics
from repro.records.record import Evidence, Record

_STRONGEST_FIRST: tuple[Evidence, ...] = get_args(Evidence)
Runs = Mapping[Path, Record]


@dataclass(frozen=True)
class Sample:
    """What the runs of one configuration say.

    values      one per run, or pair of runs, that counts
    occasions   number of the occasion of each
    interval    of the claim's value; its ends are infinite where there are fewer runs than a verdict takes
    said        how many there are, in words
    """

    values: list[float]
    occasions: list[int]
    value: float
    interval: tuple[float, float]
    said: str
    evidence: Evidence
    configuration: dict[str, Any]
    runs: Runs
    remarks: list[str]

    @property
    def complete(self) -> bool:
        """Whether there are as many runs as a verdict takes."""
        return all(map(math.isfinite, self.interval))


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
    any_in_scope: bool = True,
) -> Sample | Nothing:
    """Our value, from one configuration that has a run in every group.

    Of several: one in scope, else one with as many runs as a verdict takes, else of the stronger evidence kind, else the
    first by file name. `defaults`: what a field that no filter names must be; of runs in scope too, unless `any_in_scope`.
    `ordering` takes the smallest step of a sequence instead of first to last.
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
    samples = [s for s in found if (any_in_scope and covered(s)) or not _unusual(s.configuration, usual)]
    if not samples:
        if found:
            words_of = words(_unusual(found[0].configuration, usual))
            return Nothing("not run", f"only runs with other settings than the claim's: {words_of}")
        sides = f"no runs that differ only in what is compared ({'; '.join(map(words, reading.groups))})"
        return Nothing("not run", f"{sides}, or their ratio is no finite number")
    best = min(samples, key=lambda s: (not covered(s), not s.complete, _STRONGEST_FIRST.index(s.evidence)))
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
    left_out = Counter({_alone(reading): sum(len(group) - len(common) for group in usable)})
    pairs = []
    for found in ([group[key] for group in usable] for key in common):
        value = reading.combine([reading.of_run(run) for _, run in found], ordering)
        if (fault := _fault(reading, found)) or value is None:
            left_out[fault or "give no finite ratio"] += len(found)
        else:
            pairs.append((value, found))
    if not pairs:
        return None
    if reading.sampled == "occasions":
        by_kind = _told_apart(run for _, found in pairs for _, run in found)
        kinds = Counter(machine(found[0][1], by_kind) for _, found in pairs)
        kept = [pair for pair in pairs if machine(pair[1][0][1], by_kind) == kinds.most_common(1)[0][0]]
        left_out["ran on another kind of machine than the rest"] += len(groups) * (len(pairs) - len(kept))
        pairs = kept
    values = [value for value, _ in pairs]
    occasions = _occasions(reading, [found[0][1] for _, found in pairs])
    runs = {path: run for _, found in pairs for path, run in found}
    value, ends = interval.of(reading, values, occasions, pairs)
    many = len(set(occasions))
    enough = len(values) >= reading.needed and (reading.sampled != "occasions" or many >= statistics.OCCASIONS)
    return Sample(
        values,
        occasions,
        value,
        ends if enough and all(map(math.isfinite, ends)) else (-math.inf, math.inf),
        _said(reading, len(values), many),
        evidence,
        dict(configuration),
        runs,
        _remarks(alike, left_out, runs),
    )


def _occasions(reading: Reading, runs: Sequence[Record]) -> list[int]:
    """The number of each run's occasion, from 0 on. Repeats that one call of `repro reproduce` makes are of one, however
    long it takes."""
    numbers = statistics.occasions([run.provenance.start for run in runs])
    if reading.sampled == "occasions":
        calls = [run.repeat // reading.together for run in runs]
        for call in set(calls):
            mine = {number for number, other in zip(numbers, calls, strict=True) if other == call}
            numbers = [min(mine) if number in mine else number for number in numbers]
    order = sorted(set(numbers))
    return [order.index(number) for number in numbers]


def _usable(reading: Reading, run: Record, evidence: Evidence) -> bool:
    return run.evidence == evidence and reading.counts(run) and reading.of_run(run) is not None


def _fault(reading: Reading, found: Sequence[tuple[Path, Record]]) -> str:
    """Why runs of one repeat are not compared, as times of two occasions, kinds of machine or versions of the code never
    are; empty where they are. Jobs of one call begin when the queue lets them, and each has its nodes for itself: they
    are of one occasion."""
    if reading.sampled != "occasions":
        return ""
    [kinds] = machines([run for _, run in found])
    if len(kinds) > 1:
        return "have a partner on another kind of machine"
    if len({(run.provenance.source_hash, run.provenance.gpu_hash) for _, run in found}) > 1:
        return "have a partner by other code"
    if all(run.provenance.slurm and run.evidence == "measured" for _, run in found):  # on nodes, not on a box's
        return ""
    apart = len(set(statistics.occasions([run.provenance.start for _, run in found]))) > 1
    return _alone(reading) if apart else ""


def machine(run: Record, by_kind: bool) -> tuple[str, int, tuple[str, ...]]:
    """The kind of machine that it ran on: processor (by its name alone unless `by_kind`), how many, kinds of
    GPUs, of which a step of a job may see a part."""
    made = run.provenance
    return made.processor if by_kind else made.cpu, made.cores, tuple(sorted(set(made.gpu)))


def _told_apart(runs: Iterable[Record]) -> bool:
    """Whether some tell different kinds of processors of one name. Those of before 2026-11-29 tell the name alone."""
    kinds = {(run.provenance.cpu, run.provenance.cpu_kind) for run in runs if run.provenance.cpu_kind}
    return len(kinds) > len({name for name, _ in kinds})


def machines(*sides: Sequence[Record]) -> list[set[tuple[str, int, tuple[str, ...]]]]:
    """The kinds of machines of each side. Processors of one name count as one kind unless two runs tell different ones:
    then one that tells none is of neither."""
    by_kind = _told_apart(run for side in sides for run in side)
    return [{machine(run, by_kind) for run in side} for side in sides]


def _alone(reading: Reading) -> str:
    if reading.sampled == "occasions":
        return "have no partner of the same repeat and occasion; delete their records to run both"
    return "have no partner of the same repeat and seed"


def _said(reading: Reading, found: int, occasions: int) -> str:
    """How many runs there are, and how many a verdict takes where they are fewer."""
    if reading.banded:
        return "a prediction with its band"
    if reading.sampled == "once":
        return "one run"
    if reading.sampled == "sequences":
        return "jackknife over sequences" + (f", {found} of {reading.needed} seeds" if reading.needed > 1 else "")
    if reading.sampled == "seeds":
        return f"{found} of {reading.needed} seeds"
    what = "runs" if reading.over is None and reading.sequence is None else "interleaved pairs"
    many, asked = "1 occasion" if occasions == 1 else f"{occasions} occasions", statistics.OCCASIONS
    return f"{found} of {reading.needed} {what}, on {many}" + (f" of {asked}" if occasions < asked else "")


def _remarks(alike: list[Runs], left_out: Mapping[str, int], read: Runs) -> list[str]:
    mine = {path: run for group in alike for path, run in group.items()}
    found = []
    for status in ("failed", "skipped"):
        if bad := [run for run in mine.values() if run.status == status]:
            kinds = ", ".join(sorted({str(run.cause) for run in bad}))
            found.append(f"{status}: {kinds} ({len(bad)} of {len(mine)} runs)")
    found += [f"{count} runs {why}" for why, count in left_out.items() if count]
    codes = len({(run.provenance.source_hash, run.provenance.gpu_hash) for run in read.values()})
    return found + ([f"the runs are of {codes} versions of the code"] if codes > 1 else [])


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
            return f" (only with {name} {', '.join(sorted(set(map(str, near)))[:4])})"
    return ""
