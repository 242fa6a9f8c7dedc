"""The verdict on one claim has two axes: how our value agrees with the paper's, and in which setting it was found.

The whole interval of our value is judged, not its middle alone. What the interval leaves open is *consistent* where the
value itself agrees, else *inconclusive*, and never *reproduced*; and what was not measured as often as the claim asks for
is not judged at all. So no verdict becomes kinder by more noise.
"""

import math
from typing import Literal

from pydantic import Field

from repro.records.record import Strict

Agreement = Literal["reproduced", "further", "consistent", "same direction", "inconclusive", "deviates"]
Scope = Literal["paper's setting", "scaled down", "modelled"]

# What the words mean, for whoever shows them.
AGREEMENT: dict[Agreement, str] = {
    "reproduced": "our whole interval is within the tolerance of the paper's value; of an ordering: it holds",
    "further": "our whole interval is beyond the paper's value and its tolerance, in the direction of the claim",
    "consistent": "our value is within the tolerance; its interval is not wholly, but is at most twice as wide, and leaves out "
    "*no effect* (the value if the paper's idea did nothing), where there is one",
    "same direction": "our whole interval is on the paper's side of *no effect*, but another size",
    "inconclusive": "fewer runs than the claim asks for; or an interval that reaches into the tolerance from a value outside of "
    "it, is more than twice as wide, or holds *no effect*; of an ordering: it is left open",
    "deviates": "our interval misses the tolerance, and is not wholly on the paper's side of *no effect* or there is no such "
    "value; or it lies wholly on the other side; of an ordering: it does not hold, or not beyond the tolerance",
}
WIDEST = 2  # times the tolerance: a wider interval agrees with too much to say anything
SCOPE: dict[Scope, str] = {
    "paper's setting": "measured at the size and on the kind of machine that the claim is about; or counted, where"
    " neither matters",
    "scaled down": "real runs of something smaller: a small model, few ranks, an emulated network, a CPU",
    "modelled": "an equation or a simulation, not a run",
}


class Rule(Strict):
    """The paper's value, and how close is close enough.

    relative: `tolerance` is a fraction of the paper's value; absolute: it has the claim's unit.
    ordering, trend: our value is a ratio along the expected direction (later ÷ earlier) and must exceed 1 + tolerance.
    `no_effect`: the value if the paper's idea did nothing (1 for a speedup, 0 for a reduction). None for a plain
    quantity, which has no direction of its own. `direction`: on which side of the paper's value a value is better.
    """

    paper_value: float | None
    direction: Literal["higher", "lower", "equal"]
    comparison: Literal["relative", "absolute", "ordering", "trend"]
    tolerance: float = Field(ge=0)
    no_effect: float | None = None

    @property
    def band(self) -> tuple[float, float]:
        """Values that agree with the claim, from low to high."""
        if self.paper_value is None:
            return math.nextafter(1 + self.tolerance, math.inf), math.inf
        slack = self.tolerance * abs(self.paper_value) if self.comparison == "relative" else self.tolerance
        return self.paper_value - slack, self.paper_value + slack

    def better(self, least: float, most: float) -> bool:
        """Whether all of an interval is beyond the band on the better side."""
        low, high = self.band
        return least > high if self.direction == "higher" else self.direction == "lower" and most < low

    def has_effect(self, least: float, most: float) -> bool:
        """Whether all of an interval is on the paper's side of *no effect*; True where there is no such value."""
        if self.no_effect is None or self.paper_value is None:
            return True
        return least > self.no_effect if self.paper_value > self.no_effect else most < self.no_effect

    def has_opposite_effect(self, least: float, most: float) -> bool:
        """Whether all of an interval is on the other side of *no effect* than the paper's value."""
        if self.no_effect is None or self.paper_value is None:
            return False
        return most < self.no_effect if self.paper_value > self.no_effect else least > self.no_effect


def judge(rule: Rule, value: float, least: float, most: float) -> tuple[Agreement, str]:
    """How our value, with its interval from `least` to `most`, agrees with the claim, and why, in a few words."""
    low, high = rule.band
    inside, apart = low <= least and most <= high, most < low or high < least
    if rule.paper_value is None:
        if inside:
            return "reproduced", "the expected order holds"
        why = "the expected order does not hold beyond the tolerance"
        return ("deviates", why) if apart else ("inconclusive", "the interval leaves the order open")
    if not rule.has_effect(least, most):
        if rule.has_opposite_effect(least, most):
            return "deviates", "the effect is the other way round"
        if apart:
            return "deviates", "outside the tolerance, and it may be no effect at all"
        return "inconclusive", "the interval reaches into the tolerance, but includes *no effect*"
    if inside:
        return "reproduced", "within the tolerance"
    if not apart:
        if most - least > WIDEST * (high - low):
            return "inconclusive", f"the interval is more than {WIDEST} times as wide as the tolerance it reaches into"
        if not low <= value <= high:
            return "inconclusive", "the interval reaches into the tolerance, but the value is outside of it"
        return "consistent", "the value is within the tolerance, its interval not wholly"
    if rule.better(least, most):
        return "further", "further than the paper's value, in the direction of the claim"
    if rule.no_effect is None:
        return "deviates", "outside the tolerance"
    return "same direction", "the direction agrees, the size does not"
