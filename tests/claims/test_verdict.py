"""The verdict function, case by case, and what must hold for all cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.claims.verdict import Rule, judge

CASES = [
    # value, interval, paper, direction, comparison, tolerance, in scope, no effect → verdict
    (2.1, None, 2.0, "equal", "relative", 0.1, True, 1, "reproduced"),
    (2.1, None, 2.0, "equal", "relative", 0.1, False, 1, "trend only"),
    (2.0, (1.9, 2.1), 2.0, "equal", "relative", 0.1, True, 1, "reproduced"),
    (2.0, (1.7, 2.1), 2.0, "equal", "relative", 0.1, True, 1, "trend only"),  # spread leaves the band
    (2.0, (0.9, 2.1), 2.0, "equal", "relative", 0.1, True, 1, "deviates"),  # no effect is not excluded
    (1.5, None, 2.0, "equal", "relative", 0.1, True, 1, "deviates"),  # at the paper's scope the number counts
    (1.5, None, 2.0, "equal", "relative", 0.1, False, 1, "trend only"),  # outside it the direction
    (1.5, (0.9, 1.7), 2.0, "equal", "relative", 0.1, False, 1, "deviates"),
    (0.9, None, 2.0, "equal", "relative", 0.1, False, 1, "deviates"),  # wrong direction
    (3.0, None, 2.0, "higher", "relative", 0.1, True, 1, "reproduced"),  # better than the paper
    (3.0, None, 2.0, "equal", "relative", 0.1, True, 1, "deviates"),
    (1.0, None, 1.05, "higher", "relative", 0.1, True, 1, "deviates"),  # inside the band, but no effect
    (0.5, None, 0.6, "lower", "relative", 0.1, True, 1, "reproduced"),
    (0.5, None, 0.6, "lower", "relative", 0.1, False, 1, "trend only"),
    (0.7, None, 0.6, "lower", "relative", 0.1, True, 1, "deviates"),
    (1.2, None, 0.6, "lower", "relative", 0.1, False, 1, "deviates"),
    (0.4, None, 0.4, "higher", "relative", 0.1, True, 0, "reproduced"),  # a reduction
    (-0.1, None, 0.4, "higher", "relative", 0.1, False, 0, "deviates"),
    (21.0, None, 21.2, "equal", "relative", 0.05, True, None, "reproduced"),  # a plain quantity has no direction
    (21.0, None, 21.2, "equal", "relative", 0.05, False, None, "trend only"),
    (30.0, None, 21.2, "equal", "relative", 0.05, False, None, "deviates"),
    (22.0, (21.0, 23.0), 21.2, "equal", "relative", 0.05, True, None, "trend only"),
    (0.90, None, 0.94, "higher", "absolute", 0.05, True, None, "reproduced"),
    (0.88, None, 0.94, "higher", "absolute", 0.05, True, None, "deviates"),
    (1.0, None, 1.0, "equal", "relative", 0.01, True, 1, "reproduced"),  # the claim is that nothing changes
    (1.1, None, None, "higher", "ordering", 0.02, True, None, "reproduced"),
    (1.1, None, None, "higher", "ordering", 0.02, False, None, "trend only"),
    (1.01, None, None, "higher", "ordering", 0.02, True, None, "deviates"),  # a tie
    (1.02, None, None, "higher", "ordering", 0.02, True, None, "deviates"),
    (1.1, (1.0, 1.2), None, "higher", "ordering", 0.02, True, None, "deviates"),
    (1.1, (1.05, 1.2), None, "higher", "trend", 0.02, True, None, "reproduced"),
    (0.9, None, None, "higher", "trend", 0.02, False, None, "deviates"),
]


def rule(paper, direction, comparison, tolerance, no_effect):
    told = {"direction": direction, "comparison": comparison, "tolerance": tolerance, "no_effect": no_effect}
    return Rule(paper_value=paper, **told)


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case):
    value, interval, paper, direction, comparison, tolerance, in_scope, no_effect, expected = case
    assert judge(rule(paper, direction, comparison, tolerance, no_effect), value, interval, in_scope)[0] == expected


_number = st.floats(-10, 10, allow_nan=False)


@given(
    value=_number,
    spread=st.tuples(st.floats(0, 5), st.floats(0, 5)) | st.none(),
    paper=_number,
    direction=st.sampled_from(["higher", "lower", "equal"]),
    comparison=st.sampled_from(["relative", "absolute", "ordering", "trend"]),
    tolerance=st.floats(0, 2),
    in_scope=st.booleans(),
    no_effect=st.sampled_from([None, 0.0, 1.0]),
)
def test_reproduced_means_in_scope_and_wholly_inside_the_band(
    value, spread, paper, direction, comparison, tolerance, in_scope, no_effect
):
    ends = spread and (value - spread[0], value + spread[1])
    claimed = rule(paper, direction, comparison, tolerance, no_effect)
    found, reason = judge(claimed, value, ends, in_scope)
    low, high = claimed.band
    least, most = ends or (value, value)
    assert reason
    if found == "reproduced":
        assert in_scope and low <= least <= most <= high
    if not in_scope:
        assert found != "reproduced"
    wider = judge(claimed, value, (least - 1, most + 1), in_scope)[0]
    order = ["deviates", "trend only", "reproduced"]
    if no_effect is not None or comparison in ("ordering", "trend"):  # more spread never makes a verdict better
        assert order.index(wider) <= max(order.index(found), order.index("trend only"))
    assert wider != "reproduced" or found == "reproduced"
