"""Two folders of records, A and B, side by side: both values of every claim and of every metric of a point that both hold,
what B's runs allow, and whether A's value lies there.

`repro compare` shows it, as do the end of `repro reproduce` and the report. What cannot be told (a value that one of them
lacks, other code, too few occasions) is said as that, and never counts as agreement.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from repro.claims import metrics, registry
from repro.claims.claim import Claim
from repro.claims.interval import scale_of
from repro.claims.reading import Reading
from repro.claims.registry import OLDER, Verdict
from repro.claims.sides import Row, Side, Told, between, other_code, same, time_limited, untold
from repro.records import statistics
from repro.records.record import Record

_UNJUDGED = ("inconclusive", "skipped", "not run")
_VARYING = ("occasions", "seeds")  # another such run would give another value


@dataclass(frozen=True)
class Comparison:
    """Rows for claims and for metrics, and the records of points that only A has, and only B."""

    a: Side
    b: Side
    claims: list[Row]
    metrics: list[Row]
    only_a: list[str]
    only_b: list[str]

    @property
    def differing(self) -> list[Row]:
        """What lies outside, or is judged differently."""
        return [row for row in [*self.claims, *self.metrics] if row.differs]

    @property
    def told(self) -> int:
        """How many numbers could be compared."""
        return sum(row.inside is not None for row in [*self.claims, *self.metrics])

    @property
    def says(self) -> list[str]:
        """What came out: sentences on claims, on metrics and on times, and on what only one side has where there is such."""
        whole = [row for row in self.metrics if row.title == metrics.WHOLE]
        counted, timed = (
            [row for row in self.metrics if row.timed == by_clock and row.title != metrics.WHOLE]
            for by_clock in (False, True)
        )
        said = [sentence(self.claims, "claims"), sentence(counted, "metrics of records that no clock changes")]
        said += [sentence(timed, "timed metrics") + _room(timed)] if timed else []
        said += [sentence(whole, "whole records")] if whole else []
        only = [
            f"{len(names)} {'record' if len(names) == 1 else 'records'} only {side.name}"
            for names, side in ((self.only_a, self.a), (self.only_b, self.b))
            if names
        ]
        return [*said, f"Not on both sides: {', '.join(only)}."] if only else said


# What is said of runs of two kinds: no verdict flips.
_APART = ("no experiment", "no value", "other evidence", "other settings", "other runs", "time limit")


def compare(claims: Sequence[Claim], a: Side, b: Side) -> Comparison:
    """Everything that A and B both hold; both sides are judged on `claims`."""
    return Comparison(a, b, of_claims(claims, a, b), *metrics.compare(a, b))


def of_claims(claims: Iterable[Claim], a: Side, b: Side) -> list[Row]:
    """A row for every claim that has a verdict on both sides."""
    ours, theirs = ({row.id: row for row in side.verdicts} for side in (a, b))
    return [_row(claim, ours[claim.id], theirs[claim.id], a, b) for claim in claims if claim.id in ours.keys() & theirs]


def _row(claim: Claim, ours: Verdict, theirs: Verdict, a: Side, b: Side) -> Row:
    told = _told(claim, ours, theirs, a, b)
    comparable = not told.said.startswith(_APART)
    judged = ours.agreement not in _UNJUDGED and theirs.agreement not in _UNJUDGED
    return Row(
        **vars(told),
        name=claim.id,
        title=claim.title,
        unit=claim.unit,
        a=ours.value,
        b=theirs.value,
        verdicts=(_word(ours), _word(theirs)),
        flipped=comparable and judged and ours.agreement != theirs.agreement,
        primary=claim.primary,
    )


def _word(row: Verdict) -> str:
    return row.agreement + (OLDER if row.older_code else "")


def _told(claim: Claim, ours: Verdict, theirs: Verdict, a: Side, b: Side) -> Told:
    sides = ((a, ours), (b, theirs))
    if claim.value is None:
        return untold("no experiment", "none in this version reads this claim")
    if missing := [f"{side.name} {row.agreement}" for side, row in sides if row.value is None]:
        return untold("no value", ", ".join(missing))
    if ours.evidence != theirs.evidence:
        return untold("other evidence", ", ".join(f"{side.name} {row.evidence}" for side, row in sides))
    mine, other = ([side.runs[name] for name in row.records] for side, row in sides)
    if said := _settings(claim.value, mine[0], other[0], b.name):
        return untold("other settings", said)
    if claim.value.sampled == "sequences" and _points(mine) < _points(other):
        return other_code(_of_seeds(_by_seed(ours, mine), _by_seed(theirs, other)), mine, other)
    if claim.value.sampled not in _VARYING and _points(mine) != _points(other):
        return untold(
            "other runs", f"{a.name} rests on {len(mine)}, {b.name} on {len(other)}, not of the same points and seeds"
        )
    told = _of_values(claim.value, ours, theirs, b)
    if told.inside is False and any(map(time_limited, [*mine, *other])):
        return untold("time limit", "a search stopped when its seconds were up")
    return other_code(told, mine, other)


def _of_values(reading: Reading, ours: Verdict, theirs: Verdict, b: Side) -> Told:
    assert ours.value is not None and theirs.value is not None
    if reading.sampled not in _VARYING:
        return same(ours.value, theirs.value)
    if (ends := expected(reading, theirs, len(_groups(reading, ours)))) is None:
        return untold("too few runs", f"{b.name} has {theirs.repeats}")
    return between(ours.value, ends, "such runs lie 19 times in 20")


def _of_seeds(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Told:
    """Values by seed, of some of the other side's seeds: each is to be what that seed gave there."""
    found = all(same(value, theirs[seed]).inside for seed, value in ours.items())
    said = f"the same, of {len(ours)} of {len(theirs)} seeds" if found else "another value of a seed"
    return Told((min(theirs.values()), max(theirs.values())), found, said)


def _by_seed(row: Verdict, runs: Iterable[Record]) -> dict[int, float]:
    return dict(zip(sorted({run.seed for run in runs}), row.values, strict=True))


def _settings(reading: Reading, ours: Record, theirs: Record, name: str) -> str:
    """What is not the same in the points of two runs; empty where they are of one configuration."""
    mine, other = (dict(reading.configuration(run)) for run in (ours, theirs))
    apart = sorted(key for key in mine.keys() | other if mine.get(key) != other.get(key))
    return ", ".join(f"{key} {mine.get(key)} ({name} {other.get(key)})" for key in apart)


def _points(runs: Iterable[Record]) -> set[tuple[Any, ...]]:
    return {(run.experiment, run.repeat, run.seed, *sorted(run.point.items())) for run in runs}


def _groups(reading: Reading, row: Verdict) -> list[list[float]]:
    return scale_of(reading, row.values).groups(row.values, row.occasions)


def expected(reading: Reading, theirs: Verdict, occasions: int = 1) -> tuple[float, float] | None:
    """Where the value of so many further occasions (or seeds) lies, 19 times in 20, by B's. None for fewer than two."""
    groups = _groups(reading, theirs)
    if len(groups) < 2:
        return None
    scale = scale_of(reading, theirs.values)
    low, high = sorted(map(scale.back, statistics.prediction_interval(groups, occasions)))
    return low, high


def held_out(claims: Sequence[Claim], verdicts: Sequence[Verdict]) -> list[bool]:
    """Do the intervals hold? Of claims with `OCCASIONS` occasions, each is left out in turn: whether that occasion's
    mean lies where the others expect it, as 19 of 20 should. Claims that read the same runs are
    not independent."""
    judged, found = {row.id: row for row in verdicts}, []
    for claim in claims:
        row = judged.get(claim.id)
        if (
            row is None
            or claim.value is None
            or claim.value.sampled != "occasions"
            or len(set(row.occasions)) < statistics.OCCASIONS
        ):
            continue
        groups = _groups(claim.value, row)
        for number, group in enumerate(groups):
            low, high = statistics.prediction_interval(groups[:number] + groups[number + 1 :])
            found.append(low <= sum(group) / len(group) <= high)
    return found


# --- for whoever shows it --------------------------------------------------------------------------------------------


def cells(row: Row) -> dict[str, str]:
    """Texts of a row for a table: name, title, a, b, ratio, allowed, answer, said, verdict_a, verdict_b.

    `answer`: yes (it lies where it may), no, flipped (another verdict), or – where it cannot be told.
    """
    number, unit = registry.number, registry.suffix(row.unit) if row.unit else ""
    a, b = ("–" if value is None else number(value) + unit for value in (row.a, row.b))
    numbers = {
        "a": a,
        "b": b,
        "ratio": "–" if row.ratio is None else f"{row.ratio:.4g}",
        "allowed": "–" if row.allowed is None else "[{}, {}]".format(*map(number, row.allowed)),
        "answer": "flipped" if row.flipped else {True: "yes", False: "no", None: "–"}[row.inside],
    }
    verdicts = dict(zip(("verdict_a", "verdict_b"), row.verdicts, strict=True))
    return {"name": row.name, "title": row.title, **numbers, "said": row.said, **verdicts}


def sentence(rows: Sequence[Row], what: str) -> str:
    """`41 of 43 claims agree; 1 outside; 1 verdict flipped. 20 cannot be told: 12 other code, 8 no value.`"""
    if not rows:
        return f"No {what} on both sides."
    outside, flipped = sum(row.inside is False for row in rows), sum(row.flipped for row in rows)
    agree, told = sum(row.inside is True and not row.flipped for row in rows), sum(r.inside is not None for r in rows)
    said = [f"{agree} of {told} {what} agree", *([f"{outside} outside"] if outside else [])]
    said += [f"{flipped} {'verdict' if flipped == 1 else 'verdicts'} flipped"] if flipped else []
    reasons = Counter(row.said.partition(":")[0] for row in rows if row.inside is None)
    listed = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    left = f" {len(rows) - told} cannot be told: {listed}." if listed else ""
    return "; ".join(said) + "." + left


def _room(rows: Sequence[Row]) -> str:
    """How far apart times may lie, in words."""
    ends = [row.allowed for row in rows if row.inside is not None and row.allowed and row.allowed[0] > 0]
    if not ends:
        return ""
    factor = median(math.sqrt(high / low) for low, high in ends)
    return f" Half of these may differ by a factor of {factor:.2g} or more and still agree: the 95 % intervals are simultaneous."
