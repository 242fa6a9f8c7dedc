"""The verdict on one claim: our value beside the paper's.

The whole interval over repeats is judged, not its middle: what the spread leaves open is not called reproduced.
"""

import math
from typing import Literal

Outcome = Literal["reproduced", "trend only", "deviates"]
Direction = Literal["higher", "lower", "equal"]
Comparison = Literal["relative", "absolute", "ordering", "trend"]


def band(paper: float | None, direction: Direction, comparison: Comparison, tolerance: float) -> tuple[float, float]:
    """Values that agree with the claim, from low to high.

    relative: `tolerance` is a fraction of the paper's value; absolute: it has the claim's unit. The band is open on the
    better side of a claim whose `direction` is higher or lower.
    ordering, trend: our value is a ratio along the expected direction (later ÷ earlier) and must exceed 1 + tolerance.
    """
    if comparison in ("ordering", "trend"):
        return math.nextafter(1 + tolerance, math.inf), math.inf
    assert paper is not None, f"a {comparison} comparison needs the paper's value"
    slack = tolerance * abs(paper) if comparison == "relative" else tolerance
    low = -math.inf if direction == "lower" else paper - slack
    high = math.inf if direction == "higher" else paper + slack
    return low, high


def judge(
    value: float,
    interval: tuple[float, float] | None,
    paper: float | None,
    direction: Direction,
    comparison: Comparison,
    tolerance: float,
    in_scope: bool,
    no_effect: float | None = None,
) -> tuple[Outcome, str]:
    """The verdict and, in a few words, why.

    `interval`: low and high over repeats, None for a single run.
    `in_scope`: the evidence is of a kind and size that can reproduce the claim; other evidence shows the trend at best.
    `no_effect`: the value if the paper's idea did nothing (1 for a speedup, 0 for a reduction). None for a plain
    quantity, which has no direction of its own.
    """
    low, high = band(paper, direction, comparison, tolerance)
    least, most = interval or (value, value)
    inside, touching = low <= least and most <= high, least <= high and low <= most
    if comparison in ("ordering", "trend"):
        if not inside:
            return "deviates", "the expected order does not hold beyond the tolerance and the spread"
        return ("reproduced" if in_scope else "trend only"), "the expected order holds"
    visible = True
    if no_effect is not None and paper is not None and paper != no_effect:
        visible = least > no_effect if paper > no_effect else most < no_effect
    if not visible:
        return "deviates", "no effect in the paper's direction beyond the spread"
    if inside:
        near_low, near_high = band(paper, "equal", comparison, tolerance)
        further = not near_low <= value <= near_high
        why = "further than the paper's number, in its direction" if further else "within the tolerance"
        return ("reproduced" if in_scope else "trend only"), why
    if touching:
        return "trend only", "the spread reaches beyond the tolerance"
    if no_effect is None or in_scope:
        return "deviates", "outside the tolerance" + ("" if no_effect is None else ", direction agrees")
    return "trend only", "direction agrees, number outside the tolerance"
