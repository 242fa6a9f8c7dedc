"""The verdict on one claim: our value beside the paper's.

The whole interval over repeats is judged, not its middle: what the spread leaves open is not called reproduced.
"""

import math
from typing import Literal

from pydantic import Field

from repro.records.record import Strict

Outcome = Literal["reproduced", "trend only", "deviates"]


class Rule(Strict):
    """The paper's value, and how close is close enough.

    relative: `tolerance` is a fraction of the paper's value; absolute: it has the claim's unit.
    ordering, trend: our value is a ratio along the expected direction (later ÷ earlier) and must exceed 1 + tolerance.
    `no_effect`: the value if the paper's idea did nothing (1 for a speedup, 0 for a reduction). None for a plain
    quantity, which has no direction of its own.
    """

    paper_value: float | None
    direction: Literal["higher", "lower", "equal"]
    comparison: Literal["relative", "absolute", "ordering", "trend"]
    tolerance: float = Field(ge=0)
    no_effect: float | None = None

    @property
    def slack(self) -> float:
        """How far from the paper's value a value may be, in the unit of the claim."""
        return self.tolerance * abs(self.paper_value) if self.comparison == "relative" else self.tolerance

    @property
    def band(self) -> tuple[float, float]:
        """Values that agree with the claim, from low to high: open on the better side of a claim whose `direction` is
        higher or lower."""
        if self.comparison in ("ordering", "trend"):
            return math.nextafter(1 + self.tolerance, math.inf), math.inf
        low = -math.inf if self.direction == "lower" else self.paper_value - self.slack
        high = math.inf if self.direction == "higher" else self.paper_value + self.slack
        return low, high


def judge(rule: Rule, value: float, interval: tuple[float, float] | None, in_scope: bool) -> tuple[Outcome, str]:
    """The verdict and, in a few words, why.

    `interval`: low and high over repeats, None for a single run.
    `in_scope`: the evidence is of a kind and size that can reproduce the claim; other evidence shows the trend at best.
    """
    low, high = rule.band
    least, most = interval or (value, value)
    inside, touching = low <= least and most <= high, least <= high and low <= most
    paper, no_effect = rule.paper_value, rule.no_effect
    if rule.comparison in ("ordering", "trend"):
        if not inside:
            return "deviates", "the expected order does not hold beyond the tolerance and the spread"
        return ("reproduced" if in_scope else "trend only"), "the expected order holds"
    if no_effect is not None and (least <= no_effect < paper or paper < no_effect <= most):
        return "deviates", "no effect in the paper's direction beyond the spread"
    if inside:
        further = not paper - rule.slack <= value <= paper + rule.slack
        why = "further than the paper's number, in its direction" if further else "within the tolerance"
        return ("reproduced" if in_scope else "trend only"), why
    if touching:
        return "trend only", "the spread reaches beyond the tolerance"
    if no_effect is None or in_scope:
        return "deviates", "outside the tolerance" + ("" if no_effect is None else ", direction agrees")
    return "trend only", "direction agrees, number outside the tolerance"
