"""The registry of claims (`config/claims.yaml`) and its evaluation on run records: one verdict a claim.

What is a claim's value is declared there (see `repro.claims.reading.Reading`); what is a verdict is decided in `repro.claims.verdict`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from repro import experiments, paths
from repro.claims import filters
from repro.claims import reading as selection
from repro.claims.filters import Filters
from repro.claims.reading import Nothing, Reading
from repro.claims.verdict import Comparison, Direction, Outcome, judge
from repro.plan import config
from repro.records.interval import interval
from repro.records.record import Evidence, Record

Tag = Literal["R", "R2", "CODE", "IMG", "IMG~", "D", "INF"]
ClaimId = Annotated[str, StringConstraints(pattern=r"^(ZT|ZP|EX|FL)-[A-Z0-9]+[a-z]?(\.[a-z])?$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class Published:
    """A published number for a figure. `x` and `over` place it on a curve (`over` names the axis), else None and empty."""

    label: str
    value: float
    unit: str
    tag: str
    x: float | None = None
    over: str = ""


class PublishedColumn(_Strict):
    """Published numbers of one series: x → value, e.g. seconds over requests. `label` alone stands for a single number."""

    label: str
    unit: str
    tag: Tag
    value: float | None = None
    over: str = ""
    values: dict[float, float] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_form(self) -> "PublishedColumn":
        if (self.value is None) == (not self.values) or bool(self.values) != bool(self.over):
            raise ValueError("give either value, or over and values")
        return self

    def numbers(self) -> list[Published]:
        """One number per x, or the single one."""
        if self.value is not None:
            return [Published(self.label, self.value, self.unit, self.tag)]
        return [Published(self.label, value, self.unit, self.tag, x, self.over) for x, value in self.values.items()]


class Scope(_Strict):
    """Evidence that can reproduce a claim: its kinds, and filters that every run must pass. All else can show the trend only."""

    evidence: list[Evidence] = Field(default_factory=list)
    where: Filters = Field(default_factory=dict)

    def covers(self, run: Record) -> bool:
        """Whether a run is of a kind and size that can reproduce the claim."""
        return run.evidence in self.evidence and filters.matches(run, self.where)


class Claim(_Strict):
    """One claim of a paper. A row of the source list that states several numbers is split into `ID.a`, `ID.b`, …"""

    id: ClaimId = ""
    title: Annotated[str, StringConstraints(min_length=1, max_length=36)]  # for the axis of a figure
    paper: Annotated[str, StringConstraints(pattern=r"^\d{4}\.\d{5}$")]
    version: str
    where: str
    claim: str
    paper_value: float | None
    unit: str
    tag: Tag
    direction: Direction
    comparison: Comparison
    tolerance: float = Field(ge=0)
    tolerance_reason: str
    no_effect: float | None = None
    hardware: str
    experiments: list[str]
    value: Reading | None = None
    needs: str = ""
    reproduces_with: Scope = Field(default_factory=Scope)
    outside_scope: str = ""
    published: list[PublishedColumn] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> "Claim":
        if self.value is None:
            if not self.needs or self.experiments:
                raise ValueError("a claim without value says in `needs` what would read it, and reads no experiments")
            return self
        if [self.value.experiment] != self.experiments:
            raise ValueError(f"experiments is {self.experiments}, but value reads {self.value.experiment!r}")
        if not self.outside_scope:
            raise ValueError("outside_scope is missing: why other evidence can show the trend only")
        if (self.paper_value is None) != (self.comparison in ("ordering", "trend")):
            raise ValueError("paper_value is a number for relative and absolute, null for ordering and trend")
        if self.comparison == "relative" and self.paper_value == 0:
            raise ValueError("relative to a paper_value of 0: use absolute")
        return self

    @property
    def base(self) -> str:
        """Id without the letter of a sub-claim."""
        return self.id.split(".")[0]


class Registry(_Strict):
    """`config/claims.yaml`: claims by id."""

    claims: dict[ClaimId, Claim]

    @model_validator(mode="after")
    def _name(self) -> "Registry":
        for key, claim in self.claims.items():
            claim.id = key
        return self


class Verdict(BaseModel):
    """A row of the verdict table."""

    id: str
    paper: str
    claim: str
    paper_value: float | None
    value: float | None
    interval: tuple[float, float] | None
    unit: str
    evidence: Evidence | None
    tolerance: float
    verdict: Outcome | Literal["skipped", "not run"]
    reason: str
    records: list[str]


def load(path: Path | None = None) -> list[Claim]:
    """All claims in the order of the file; ConfigError (a ValueError) names file, claim, key, what was found and is allowed."""
    path = path or paths.root() / "config/claims.yaml"
    registry = list(config.load_yaml(path, Registry).claims.values())
    for claim in registry:
        if claim.value is not None:
            _check_reading(claim, f"{path}: claims.{claim.id}")
    return registry


def _check_reading(claim: Claim, where: str) -> None:
    """A claim must ask for an experiment, metrics and fields that exist; a typing error would read *not run* for ever."""
    assert claim.value is not None
    reading = claim.value
    if reading.experiment not in experiments.names():
        raise config.ConfigError(
            f"{where}.value.experiment: found {reading.experiment!r}; allowed: {', '.join(experiments.names())}"
        )
    experiment = experiments.get(reading.experiment)
    fields = experiment.parameters.model_fields.keys()
    known = experiment.reports | fields
    ends = [f"{reading.metric}_low", f"{reading.metric}_high"] if reading.banded else []
    asked = {"value.metric": [reading.metric, *ends], "value.per": [reading.per] if reading.per else []}
    asked |= {"value.where, over or sequence": [name for group in reading.groups for name in group]}
    asked |= {"reproduces_with.where": claim.reproduces_with.where}
    for key, names in asked.items():
        if unknown := sorted(set(names) - known):
            raise config.ConfigError(f"{where}.{key}: found {', '.join(unknown)}; allowed: {', '.join(sorted(known))}")
    for group in reading.groups:
        values = {k: v for k, v in group.items() if k in fields and not isinstance(v, dict | list)}
        config.point(reading.experiment, values, f"{where}.value")


def published(claim_id: str, path: Path | None = None) -> list[Published]:
    """Published numbers of a claim, or of all sub-claims of a base id, for figures.

    A claim that lists none gives its own value. ValueError lists the known ids.
    """
    claims = load(path)
    chosen = [claim for claim in claims if claim_id in (claim.id, claim.base)]
    if not chosen:
        known = sorted({claim.id for claim in claims} | {claim.base for claim in claims})
        raise ValueError(f"no claim {claim_id!r}, known: {', '.join(known)}")
    listed = [number for claim in chosen for column in claim.published for number in column.numbers()]
    return listed or [
        Published(claim.id, claim.paper_value, claim.unit, claim.tag)
        for claim in chosen
        if claim.paper_value is not None
    ]


def evaluate(claims: Sequence[Claim], records: Mapping[Path, Record], problems: Sequence[str] = ()) -> list[Verdict]:
    """A verdict for every claim. `problems`: files that should have been records; a claim that might have read one says so."""
    return [_evaluate(claim, records, problems) for claim in claims]


def _evaluate(claim: Claim, records: Mapping[Path, Record], problems: Sequence[str]) -> Verdict:
    if claim.value is None:
        return _row(claim, "not run", f"no experiment in this version reads this claim; it needs {claim.needs}")
    ordering = claim.comparison == "ordering"
    found = selection.read(claim.value, records, claim.reproduces_with.covers, ordering)
    damaged = [text for text in problems if f"/{claim.value.experiment}/" in text]
    remarks = [f"{len(damaged)} unreadable files among the records, not read"] if damaged else []
    if isinstance(found, Nothing):
        return _row(claim, found.verdict, "; ".join([found.reason, *remarks]), found.runs)
    value, low, high = interval(found.values)
    spread = None if math.isnan(low) else (low, high)
    if claim.value.banded:
        spread = claim.value.band(next(iter(found.runs.values())))
    in_scope = all(claim.reproduces_with.covers(run) for run in found.runs.values())
    verdict, words = judge(
        value,
        spread,
        claim.paper_value,
        claim.direction,
        claim.comparison,
        claim.tolerance,
        in_scope,
        claim.no_effect,
    )
    scope = [] if in_scope else [f"outside the claim's scope: {claim.outside_scope}"]
    repeats = f"{len(found.values)} repeats" if len(found.values) > 1 else "a single run"
    if claim.value.banded:
        repeats = "a prediction with its band"
    reason = "; ".join([f"{words} ({found.evidence}, {repeats})", *scope, *found.remarks, *remarks])
    return _row(claim, verdict, reason, found.runs, value=value, interval=spread, evidence=found.evidence)


def _row(
    claim: Claim,
    verdict: str,
    reason: str,
    runs: Mapping[Path, Record] | None = None,
    value: float | None = None,
    interval: tuple[float, float] | None = None,
    evidence: Evidence | None = None,
) -> Verdict:
    version = claim.version if claim.version.removeprefix("v").isdigit() else ""
    return Verdict(
        id=claim.id,
        paper=claim.paper + version,
        claim=f"{claim.claim} [{claim.where}; {claim.tag}]",
        paper_value=claim.paper_value,
        value=value,
        interval=interval,
        unit=claim.unit,
        evidence=evidence,
        tolerance=claim.tolerance,
        verdict=verdict,  # type: ignore[arg-type]  # one of the five; pydantic checks it
        reason=reason,
        records=[_relative(path) for path in sorted(runs or {})],
    )


def _relative(path: Path) -> str:
    try:
        return path.resolve().relative_to(paths.root().resolve()).as_posix()
    except (ValueError, FileNotFoundError):
        return path.as_posix()


def numbers(row: Mapping[str, Any]) -> tuple[str, str]:
    """The paper's value and ours as short texts for a table, from a dumped `Verdict`: `1.71 ×`, `1.40 × [1.31, 1.52]`."""

    def text(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

    unit = "" if row["unit"] == "1" else f" {row['unit']}"
    paper, ours = ("–" if row[key] is None else text(row[key]) + unit for key in ("paper_value", "value"))
    if row["interval"] is not None:
        ours += " [{}, {}]".format(*map(text, row["interval"]))
    return paper, ours
