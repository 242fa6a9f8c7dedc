"""A claim of a paper: what the paper says, how close is close enough, and which of our numbers answers."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from repro.claims.filters import Filters, matches
from repro.claims.reading import Reading
from repro.claims.verdict import Rule
from repro.records.record import Evidence, Record, Strict

Tag = Literal["R", "R2", "CODE", "IMG", "IMG~", "D", "INF"]


class Published(Strict):
    """A published number for a figure. On a curve, `over` names the axis and `x` is the place on it."""

    label: str
    value: float
    unit: str
    tag: Tag
    x: float | None = None
    over: str = ""

    @model_validator(mode="after")
    def _one_form(self) -> "Published":
        if (self.x is None) != (not self.over):
            raise ValueError("x and over (the name of its axis) belong together")
        return self


class Scope(Strict):
    """Evidence that can reproduce a claim: its kinds, and filters that every run must pass.

    All other evidence can show the trend only, for the reason in `outside`.
    """

    evidence: list[Evidence] = Field(default_factory=list)
    where: Filters = Field(default_factory=dict)
    outside: Annotated[str, StringConstraints(min_length=1)]

    def covers(self, run: Record) -> bool:
        """Whether a run is of a kind and size that can reproduce the claim."""
        return run.evidence in self.evidence and matches(run, self.where)


class Claim(Rule):
    """One claim of a paper. A row of the source list that states several numbers is split into `ID.a`, `ID.b`, …"""

    id: str
    title: Annotated[str, StringConstraints(min_length=1, max_length=36)]  # for the axis of a figure
    paper: Annotated[str, StringConstraints(pattern=r"^\d{4}\.\d{5}$")]
    version: str
    where: str
    claim: str
    unit: str
    tag: Tag
    tolerance_reason: str
    hardware: str
    scope: Scope | None = None
    value: Reading | None = None
    needs: str = ""
    published: list[Published] = Field(default_factory=list)

    @model_validator(mode="after")
    def _consistent(self) -> "Claim":
        if self.value is None:
            if not self.needs:
                raise ValueError("a claim without value says in `needs` what would read it")
            return self
        if self.scope is None:
            raise ValueError("scope is missing: which evidence can reproduce the claim, and why other evidence cannot")
        if (self.paper_value is None) != (self.comparison in ("ordering", "trend")):
            raise ValueError("paper_value is a number for relative and absolute, null for ordering and trend")
        if self.comparison == "relative" and self.paper_value == 0:
            raise ValueError("relative to a paper_value of 0: use absolute")
        return self

    @property
    def base(self) -> str:
        """Id without the letter of a sub-claim."""
        return self.id.split(".")[0]
