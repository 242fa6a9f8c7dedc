"""Shipped records of other machines than the one that the verdicts rest on, compared with it claim by claim."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from repro.claims import compare, sides
from repro.claims.claim import Claim
from repro.claims.sides import Row, Side
from repro.records.record import Provenance
from repro.report.docs import facts


@dataclass(frozen=True)
class Machine:
    """A machine's records beside the shipped ones of the verdicts.

    hardware       in words, with the number of records
    processor      of its runs of claims on times, by name and kind
    kind           its processors beside those of the shipped records of claims on times, to begin a sentence
    evidence       kind of evidence of each claim's value there, by id; "" without one
    occasions      how many occasions its timed points have, at most
    claims         a row for every claim but those in `shared`: its value there, the one of the verdicts, and what can be
                   said of the two
    timed, others  those of them whose values can be compared: of claims on times, and of the rest
    turned         of `timed`, those outside with the opposite effect
    shared         claims that rest on runs which both folders hold
    """

    name: str
    hardware: str
    processor: str
    kind: str
    evidence: Mapping[str, str]
    occasions: int
    claims: Sequence[Row]
    timed: Sequence[Row]
    others: Sequence[Row]
    turned: Sequence[Row]
    shared: Sequence[str]

    @property
    def what(self) -> str:
        """The machine and its runs, to begin a sentence."""
        runs = "1 occasion" if self.occasions == 1 else f"at most {self.occasions} occasions"
        return f"{self.kind} ({self.name}, {runs})"

    @property
    def farthest(self) -> Row | None:
        """Of `outside`, the value that differs by the largest factor."""
        factors = {row.name: max(row.ratio, 1 / row.ratio) for row in self.outside if row.ratio and row.ratio > 0}
        return max(self.outside, key=lambda row: factors.get(row.name, 0), default=None)

    @property
    def outside(self) -> list[Row]:
        """Claims on times whose values lie where the shipped runs do not allow them."""
        return [row for row in self.timed if row.inside is False]

    @property
    def by_other_code(self) -> str:
        """Of how many of `outside` the runs are of other code, to go on a sentence; nothing where of none."""
        count = sum(row.outside_by_other_code for row in self.outside)
        if not count:
            return ""
        return f" ({'all' if count == len(self.outside) else count} of them of other code as well: machine or code may be the cause)"

    @property
    def primary_outside(self) -> list[Row]:
        return [row for row in self.outside if row.primary]

    @property
    def says(self) -> str:
        """How many lie where they may, whichever code made them, and how many are by other code."""
        out, differ = len(self.outside), sum(row.inside is False for row in self.others)
        apart = sum(row.by_other_code for row in [*self.timed, *self.others])
        by_other = sum(row.outside_by_other_code for row in self.outside)
        said = f"Of {len(self.timed)} claims on times {len(self.timed) - out} lie inside what the shipped runs allow, {out} outside ({by_other} of these by other code); "
        said += f"{len(self.others) - differ} of {len(self.others)} others agree. "
        said += f"{apart} of those inside or in agreement are by other code than the shipped ones. " if apart else ""
        said += f"{len(self.claims) - len(self.timed) - len(self.others)} cannot be compared"
        return said + (f"; {len(self.shared)} rest on the very runs that are shipped." if self.shared else ".")


def others(claims: Sequence[Claim], shipped: Side) -> list[Machine]:
    """The machines in the folder of the shipped ones, by name, but for the one that the verdicts rest on."""
    own = sides.shipped_folder()
    folders = [each.parent for each in sorted(own.parent.glob("*/records")) if each.parent != own]
    return [_machine(claims, sides.read(each.name, each, claims), shipped) for each in folders]


def spans(claims: Sequence[Claim], shipped: Side) -> str:
    """Of how many processors by name the shipped runs of claims on times are, each claim's of how many days (UTC), and
    within how many hours, to go on a sentence; "" without any. Runs on GPUs do not count."""
    timed = {claim.id for claim in claims if claim.value and claim.value.sampled == "occasions"}
    names, days, longest = set(), Counter[int](), timedelta()
    for verdict in shipped.verdicts:
        runs = [shipped.runs[name].provenance for name in verdict.records if verdict.id in timed]
        if runs and not any(run.gpu for run in runs):
            names |= {run.cpu for run in runs}
            starts = [run.start for run in runs]
            longest = max(longest, max(starts) - min(starts))
            days[len({run.start.astimezone(UTC).date() for run in runs})] += 1
    if not days:
        return ""
    (most, _), *rest = days.most_common()
    others = "; ".join(f"{count} of {days.total()} claims: from {_count(number, 'day')}" for number, count in rest)
    said = f"processors of {_count(len(names), 'name')} and, for each claim, from {_count(most, 'day')}"
    return f"{said}{f' ({others})' if others else ''}, at most {longest / timedelta(hours=1):.0f} hours apart"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _machine(claims: Sequence[Claim], side: Side, shipped: Side) -> Machine:
    ours, theirs = (_runs(each) for each in (side, shipped))
    shared = [claim.id for claim in claims if ours[claim.id] and ours[claim.id] == theirs[claim.id]]
    rows = compare.of_claims([claim for claim in claims if claim.id not in shared], side, shipped)
    known = {claim.id: claim for claim in claims}
    told = [row for row in rows if row.allowed is not None]
    timed = [row for row in told if (value := known[row.name].value) and value.sampled == "occasions"]
    made = _provenances(side, timed)
    return Machine(
        name=side.name,
        hardware="; ".join(facts.machines(list(side.records.values()))),
        evidence={row.id: row.evidence or "" for row in side.verdicts},
        processor=_processor(made),
        kind=_kind(made, _provenances(shipped, timed)),
        occasions=max(
            (len(set(row.occasions)) for row in side.verdicts if row.id in {each.name for each in timed}), default=1
        ),
        claims=rows,
        timed=timed,
        others=[row for row in told if row not in timed],
        turned=[row for row in timed if row.inside is False and _turned(row, known[row.name])],
        shared=shared,
    )


def _provenances(side: Side, rows: Sequence[Row]) -> list[Provenance]:
    """Of the runs that claims rest on."""
    names = {row.name for row in rows}
    records = {name for verdict in side.verdicts if verdict.id in names for name in verdict.records}
    return [side.runs[name].provenance for name in records]


def _processor(runs: Sequence[Provenance]) -> str:
    """That of most runs, of those that tell its kind where any do."""
    found = Counter(run.processor for run in [run for run in runs if run.cpu_kind] or runs).most_common(1)
    return found[0][0] if found else ""


def _kind(ours: Sequence[Provenance], theirs: Sequence[Provenance]) -> str:
    if not {run.cpu for run in ours} <= {run.cpu for run in theirs}:
        return "Another kind of machine"
    # Runs of before 2026-11-29 do not tell it.
    here, there = ({run.cpu_kind for run in runs} - {""} for runs in (ours, theirs))
    if here and there and not here & there:
        return "A different processor that reports the same name"
    return "A machine with a processor of the same name, which may be another, in a run of its own"


def _runs(side: Side) -> dict[str, set[tuple[str, datetime]]]:
    """By claim, the runs that its value rests on: their experiments, and when they began."""
    return {
        row.id: {(run.experiment, run.provenance.start) for run in (side.runs[name] for name in row.records)}
        for row in side.verdicts
    }


def _turned(row: Row, claim: Claim) -> bool:
    """Whether one value is more, and the other less, than where there is no effect (of an order: where it ends)."""
    assert row.a is not None and row.b is not None
    neutral = 1 if claim.paper_value is None else claim.no_effect
    return neutral is not None and (row.a - neutral) * (row.b - neutral) < 0
