"""Two folders of records, A and B, and what can be said of one number of A beside that of B."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from repro import paths
from repro.claims import registry, sample
from repro.claims.claim import Claim
from repro.claims.registry import Verdict
from repro.experiments import stored
from repro.plan import config
from repro.records.record import Record

_OTHER = "by other code"
SAME = 1e-3  # relative difference of what does not depend on the machine's state: three digits


@dataclass(frozen=True)
class Side:
    """Records of a folder and the verdicts that they give. `name`: what a table calls it, such as A or "here"."""

    name: str
    folder: Path
    records: Mapping[Path, Record]
    verdicts: Sequence[Verdict]
    problems: Sequence[str] = ()

    @cached_property
    def runs(self) -> dict[str, Record]:
        """Records by the names that verdicts give them."""
        return {registry.relative(path): run for path, run in self.records.items()}


def read(name: str, folder: Path, claims: Sequence[Claim]) -> Side:
    """All records below the folder `records` in `folder`, or below `folder` itself, judged."""
    inner = folder / "records" if (folder / "records").is_dir() else folder
    found = stored.collect(inner)
    return Side(name, inner, found.records, registry.evaluate(claims, found.records, found.problems), found.problems)


def shipped_folder() -> Path:
    """The shipped records that `config.yaml` names."""
    return paths.root() / config.load()[0].shipped


def shipped(claims: Sequence[Claim]) -> Side:
    """The shipped records, judged."""
    return read("shipped", shipped_folder(), claims)


@dataclass(frozen=True)
class Told:
    """Whether A's value lies where B's runs allow it.

    allowed  ends of where it may lie; None where B's runs do not say
    inside   None where it cannot be told
    said     in words; where it cannot be told, the kind of reason stands before a colon
    """

    allowed: tuple[float, float] | None
    inside: bool | None
    said: str

    @property
    def by_other_code(self) -> bool:
        """It lies where it may, which between runs of different code is no agreement (`other_code`)."""
        return self.inside is None and self.allowed is not None

    @property
    def outside_by_other_code(self) -> bool:
        """It lies outside, and between runs of different code."""
        return self.inside is False and _OTHER in self.said


@dataclass(frozen=True)
class Row(Told):
    """One number of A beside that of B.

    name, title  id and title of a claim; or the record, in A's folder, and the metric
    verdicts     of a claim, by A and by B; `flipped`: both judge it, from runs of one kind, and differently
    timed        of a metric: whether the machine's state may change it
    """

    name: str
    title: str
    unit: str
    a: float | None
    b: float | None
    verdicts: tuple[str, str] = ("", "")
    flipped: bool = False
    primary: bool = False
    timed: bool = False

    @property
    def ratio(self) -> float | None:
        """a ÷ b; None where there is none."""
        return self.a / self.b if self.a is not None and self.b and math.isfinite(self.a / self.b) else None

    @property
    def differs(self) -> bool:
        """Outside of what is allowed, or judged differently."""
        return self.inside is False or self.flipped


def untold(kind: str, said: str) -> Told:
    return Told(None, None, f"{kind}: {said}")


def same(a: float, b: float) -> Told:
    """Of what no clock measures: whether two values have the same three digits."""
    ends = (b - SAME * abs(b), b + SAME * abs(b))
    inside = a == b or ends[0] <= a <= ends[1]
    return Told(ends, inside, "the same value" if inside else "another value, of what no clock measures")


def between(value: float, ends: tuple[float, float], where: str) -> Told:
    """Of what varies: whether a value lies between the ends of an interval; `where` says what lies there."""
    inside = ends[0] <= value <= ends[1]
    found = "inside" if inside else "outside"
    return Told(ends, inside, f"{found} [{registry.number(ends[0])}, {registry.number(ends[1])}], where {where}")


def other_code(told: Told, ours: Sequence[Record], theirs: Sequence[Record]) -> Told:
    """Agreement between runs of different code is none; where they do not agree, that is said beside it, and if the
    processors differ."""
    sides = [[run.provenance for run in runs] for runs in (ours, theirs)]
    mine, other = ({made.source_hash for made in side} for side in sides)
    on_mine, on_other = ({made.gpu_hash for made in side} - {""} for side in sides)  # a GPU may be there, and idle
    same = mine == other and (on_mine == on_other or not (on_mine and on_other))
    if told.inside is False:
        here, there = ({name for name, *_ in found} for found in sample.machines(ours, theirs))
        on_others = here != there
        why = [*([_OTHER] if not same else []), *(["on another processor"] if on_others else [])]
        return Told(told.allowed, False, "; ".join([told.said, ", ".join(why)] if why else [told.said]))
    if same or told.inside is None:
        return told
    return Told(told.allowed, None, f"other code: {told.said}")


def time_limited(run: Record) -> bool:
    """Whether a search stopped because its seconds were up, so that the machine's speed decides its result."""
    return run.conditions.get("time_limited") == "yes"
