"""Whether the values of one run agree with the shipped ones: an answer for who has run few of the many runs that a
verdict takes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from repro.claims.claim import Claim
from repro.claims.reading import Reading, scale_of
from repro.claims.registry import OLDER, Verdict
from repro.records import statistics

_SAME = 1e-3  # relative difference of what does not depend on the machine's state: three digits


@dataclass(frozen=True)
class Beside:
    """`agrees`: None where it cannot be told; `said` in words. `shipped`: the shipped verdict."""

    agrees: bool | None
    said: str
    shipped: str


def compare(claims: Iterable[Claim], here: Sequence[Verdict], shipped: Sequence[Verdict]) -> dict[str, Beside]:
    """By claim, for the claims that have a row in both."""
    ours, theirs = ({row.id: row for row in rows} for rows in (here, shipped))
    return {c.id: _beside(c, ours[c.id], theirs[c.id]) for c in claims if c.id in ours and c.id in theirs}


def _beside(claim: Claim, here: Verdict, shipped: Verdict) -> Beside:
    words = shipped.agreement + (OLDER if shipped.older_code else "") + (f" ({shipped.scope})" if shipped.scope else "")
    if claim.value is None or here.value is None or shipped.value is None:
        return Beside(None, "not run" if here.value is None else "nothing shipped", words)
    if here.evidence != shipped.evidence:
        return Beside(None, f"{here.evidence}, shipped is {shipped.evidence}", words)
    if claim.value.sampled not in ("occasions", "seeds"):
        agrees = math.isclose(here.value, shipped.value, rel_tol=_SAME)
        return Beside(agrees, "the same value" if agrees else "another value", words)
    if (ends := expected(claim.value, shipped, len(_means(claim.value, here)))) is None:
        return Beside(None, f"too few shipped runs to tell ({shipped.repeats})", words)
    low, high = ends
    agrees = low <= here.value <= high
    where = "inside" if agrees else "outside"
    return Beside(agrees, f"{where} [{low:.3g}, {high:.3g}], where such a run lies 19 times in 20", words)


def _means(reading: Reading, row: Verdict) -> list[float]:
    return scale_of(reading, row.values).means(row.values, row.occasions)


def expected(reading: Reading, shipped: Verdict, occasions: int = 1) -> tuple[float, float] | None:
    """Where the value of so many further occasions (or seeds) lies, 19 times in 20, by the shipped ones. None for fewer
    than two of these."""
    means = _means(reading, shipped)
    if len(means) < 2:
        return None
    scale = scale_of(reading, shipped.values)
    low, high = sorted(map(scale.back, statistics.prediction_interval(means, occasions)))
    return low, high
