"""A claim of a paper: what the paper says, how close is close enough, and which of our numbers answers."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from repro.claims.filters import Filters, accepts, matches
from repro.claims.reading import Reading
from repro.claims.verdict import Rule
from repro.records.record import Evidence, Record, Strict

Tag = Literal["R", "R2", "CODE", "IMG", "IMG~", "D", "INF"]
Kind = Literal["claim", "self-check", "critique", "validation", "variant"]

# What the words mean, for whoever shows them.
KIND: dict[Kind, str] = {
    "claim": "a statement of the paper, judged by our runs; only these are counted as claims",
    "self-check": "our code against its own formula, or arithmetic on the paper's numbers: it should hold, and says"
    " nothing about the paper",
    "critique": "a question of ours that the paper does not ask: another baseline, what a count leaves out, a harder text; no failure of the paper",
    "validation": "our model against measurements by others or, where it says so, our own",
    "variant": "a claim with another choice where the paper leaves one: shows how much depends on it",
}
TAG: dict[Tag, str] = {
    "R": "read in the primary text",
    "R2": "read in a secondary text",
    "CODE": "read in the authors' code",
    "IMG": "read off a figure",
    "IMG~": "measured from the bars of a figure",
    "D": "arithmetic on published numbers",
    "INF": "inferred, published nowhere",
}
PRIMARY = 4  # a paper has at most so many primary claims


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
    """The paper's setting: kinds of evidence, and filters that every run must pass. `outside`: how other runs differ.
    Without `evidence` no run is in the paper's setting."""

    evidence: list[Evidence] = Field(default_factory=list)
    where: Filters = Field(default_factory=dict)
    outside: Annotated[str, StringConstraints(min_length=1)]

    def covers(self, run: Record) -> bool:
        """Whether a run is in the paper's setting."""
        return run.evidence in self.evidence and matches(run, self.where)


class Claim(Rule):
    """One claim of a paper. A row of the source list that states several numbers is split into `ID.a`, `ID.b`, …

    `primary` claims were named before the runs that judge them: at most `PRIMARY` of a paper. All others are
    exploratory. `kind` and `tag`: words of `KIND` and `TAG`. `needs`: of a claim without `value`, what would read it.
    """

    id: str
    kind: Kind = "claim"
    primary: bool = False
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
        if self.value is None and not self.needs:
            raise ValueError("a claim without value says in `needs` what would read it")
        if self.value is not None and self.scope is None:
            raise ValueError("scope is missing: which runs are in the paper's setting, and how others differ from it")
        if (self.paper_value is None) != (self.comparison in ("ordering", "trend")):
            raise ValueError("paper_value is a number for relative and absolute, null for ordering and trend")
        if self.comparison == "relative" and self.paper_value == 0:
            raise ValueError("relative to a paper_value of 0: use absolute")
        if self.no_effect is not None and self.no_effect == self.paper_value:
            raise ValueError("no_effect is the paper_value: leave it out")
        if self.no_effect is not None and self.paper_value is not None:
            towards = "lower" if self.paper_value > self.no_effect else "higher"
            if self.direction == towards:
                raise ValueError(f"direction: found {towards}, which leads from paper_value towards no_effect")
        if self.primary and self.kind != "claim":
            raise ValueError(f"primary: found a {self.kind}; allowed: claims")
        return self

    @property
    def needs_shaped_links(self) -> bool:
        """Whether it is *not run* where links between ranks cannot be shaped."""
        where = self.value.where if self.value else {}
        return "fabric" in where and not accepts(where["fabric"], "unshaped")

    @property
    def base(self) -> str:
        """Id without the letter of a sub-claim."""
        return self.id.split(".")[0]
