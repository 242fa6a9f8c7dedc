"""Shipped records of other machines than the one that the verdicts rest on, compared with it claim by claim."""

from collections.abc import Sequence
from dataclasses import dataclass

from repro.claims import compare, sides
from repro.claims.claim import Claim
from repro.claims.sides import Row, Side
from repro.report.docs import facts


@dataclass(frozen=True)
class Machine:
    """A machine's records beside the shipped ones of the verdicts.

    hardware   in words, with the number of records
    occasions  how many occasions its timed points have, at most
    claims     a row for every claim: its value there, the one of the verdicts, and what can be said of the two
    turned     those of them that differ and have the opposite effect
    """

    name: str
    hardware: str
    occasions: int
    claims: Sequence[Row]
    turned: Sequence[Row]

    @property
    def runs(self) -> str:
        return "1 occasion" if self.occasions == 1 else f"at most {self.occasions} occasions"

    @property
    def says(self) -> str:
        return compare.sentence(self.claims, "claims")

    @property
    def told(self) -> list[Row]:
        """The claims of which it can be told whether they agree."""
        return [row for row in self.claims if row.inside is not None or row.flipped]

    @property
    def differing(self) -> list[Row]:
        return [row for row in self.claims if row.differs]


def others(claims: Sequence[Claim], shipped: Side) -> list[Machine]:
    """The machines in the folder of the shipped ones, by name, but for the one that the verdicts rest on."""
    own = sides.shipped_folder()
    folders = [each for each in sorted(own.parent.iterdir()) if (each / "records").is_dir() and each != own]
    return [_machine(claims, sides.read(each.name, each, claims), shipped) for each in folders]


def _machine(claims: Sequence[Claim], side: Side, shipped: Side) -> Machine:
    rows = compare.of_claims(claims, side, shipped)
    neutral = {claim.id: claim.no_effect for claim in claims}
    return Machine(
        name=side.name,
        hardware="; ".join(facts.machines(list(side.records.values()))),
        occasions=max((len(set(row.occasions)) for row in side.verdicts), default=1),
        claims=rows,
        turned=[row for row in rows if row.differs and _turned(row, neutral[row.name])],
    )


def _turned(row: Row, neutral: float | None) -> bool:
    """Whether one value is more, and the other less, than where there is no effect."""
    assert row.a is not None and row.b is not None
    return neutral is not None and (row.a - neutral) * (row.b - neutral) < 0
