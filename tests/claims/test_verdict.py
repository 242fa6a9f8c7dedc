"""The verdict function, case by case, and what must hold for all cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.claims.verdict import AGREEMENT, Rule, judge

CASES = [
    # interval, paper, direction, comparison, tolerance, no effect, agreement
    ((1.9, 2.1), 2.0, "equal", "relative", 0.1, 1, "reproduced"),
    ((2.1, 2.1), 2.0, "equal", "relative", 0.1, 1, "reproduced"),
    ((1.7, 2.1), 2.0, "equal", "relative", 0.1, 1, "consistent"),  # part of it outside the tolerance
    ((1.5, 2.25), 2.0, "equal", "relative", 0.1, 1, "consistent"),
    ((1.2, 5.0), 2.0, "equal", "relative", 0.1, 1, "inconclusive"),  # agrees with too much
    ((0.9, 2.1), 2.0, "equal", "relative", 0.1, 1, "inconclusive"),  # holds no effect and the paper's value
    ((0.9, 1.7), 2.0, "equal", "relative", 0.1, 1, "deviates"),
    ((1.4, 1.6), 2.0, "equal", "relative", 0.1, 1, "same direction"),
    ((0.9, 0.9), 2.0, "equal", "relative", 0.1, 1, "deviates"),  # the other direction
    ((2.9, 3.1), 2.0, "higher", "relative", 0.1, 1, "further"),
    ((2.0, 2.3), 2.0, "higher", "relative", 0.1, 1, "consistent"),  # two-sided
    ((2.1, 2.4), 2.0, "higher", "relative", 0.1, 1, "inconclusive"),  # reaches into it from a value outside
    ((1.6, 1.9), 2.0, "equal", "relative", 0.1, 1, "inconclusive"),
    ((2.9, 3.1), 2.0, "equal", "relative", 0.1, 1, "same direction"),
    ((1.0, 1.0), 1.05, "higher", "relative", 0.1, 1, "inconclusive"),  # inside the tolerance, and no effect
    ((0.96, 0.97), 1.05, "higher", "relative", 0.1, 1, "deviates"),  # inside the tolerance, and the opposite effect
    ((0.96, 1.02), 1.05, "higher", "relative", 0.1, 1, "inconclusive"),
    ((0.2, 0.3), 0.6, "lower", "relative", 0.1, None, "further"),
    ((0.7, 0.8), 0.6, "lower", "relative", 0.1, None, "deviates"),
    ((0.7, 0.8), 0.6, "lower", "relative", 0.1, 1, "same direction"),
    ((0.4, 0.4), 0.4, "higher", "relative", 0.1, 0, "reproduced"),  # a reduction
    ((-0.1, -0.1), 0.4, "higher", "relative", 0.1, 0, "deviates"),
    ((21.0, 21.0), 21.2, "equal", "relative", 0.05, None, "reproduced"),  # a plain quantity has no direction
    ((21.0, 23.0), 21.2, "equal", "relative", 0.05, None, "consistent"),
    ((29.0, 30.0), 21.2, "equal", "relative", 0.05, None, "deviates"),
    ((5.0, 60.0), 21.2, "equal", "relative", 0.05, None, "inconclusive"),
    ((0.90, 0.95), 0.94, "higher", "absolute", 0.05, None, "reproduced"),
    ((0.80, 0.88), 0.94, "higher", "absolute", 0.05, None, "deviates"),
    ((1.1, 1.1), None, "higher", "ordering", 0.02, None, "reproduced"),
    ((1.01, 1.01), None, "higher", "ordering", 0.02, None, "deviates"),  # a tie
    ((1.02, 1.02), None, "higher", "ordering", 0.02, None, "deviates"),
    ((1.0, 1.2), None, "higher", "ordering", 0.02, None, "inconclusive"),
    ((1.05, 1.2), None, "higher", "trend", 0.02, None, "reproduced"),
    ((0.9, 0.95), None, "higher", "trend", 0.02, None, "deviates"),
]


def rule(paper, direction, comparison, tolerance, no_effect):
    told = {"direction": direction, "comparison": comparison, "tolerance": tolerance, "no_effect": no_effect}
    return Rule(paper_value=paper, **told)


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case):
    interval, paper, direction, comparison, tolerance, no_effect, expected = case
    found, why = judge(rule(paper, direction, comparison, tolerance, no_effect), sum(interval) / 2, *interval)
    assert found == expected and why


def test_an_open_effect_and_the_opposite_one_are_told_apart():
    claimed = rule(2.2, "higher", "relative", 0.1, 1)
    assert judge(claimed, 1.1, 0.98, 1.28) == ("deviates", "outside the tolerance, and it may be no effect at all")
    assert judge(claimed, 0.85, 0.8, 0.9) == ("deviates", "the effect is the other way round")


def test_every_word_has_a_case():
    assert {case[-1] for case in CASES} == set(AGREEMENT)


_number = st.floats(-10, 10, allow_nan=False)


@given(
    told=st.tuples(_number, _number, _number).map(sorted),
    wider=st.tuples(st.floats(0, 5), st.floats(0, 5)),
    paper=_number | st.none(),
    direction=st.sampled_from(["higher", "lower", "equal"]),
    comparison=st.sampled_from(["relative", "absolute"]),
    tolerance=st.floats(0, 2),
    no_effect=st.sampled_from([None, 0.0, 1.0]),
)
def test_a_wider_interval_never_says_more(told, wider, paper, direction, comparison, tolerance, no_effect):
    """It says the same, or that it cannot tell; *consistent* only where all of the narrower one agreed."""
    claimed = rule(paper, direction, comparison if paper is not None else "ordering", tolerance, no_effect)
    least, value, most = told
    found, _ = judge(claimed, value, least, most)
    said, _ = judge(claimed, value, least - wider[0], most + wider[1])
    lost = found in ("same direction", "further") and said == "deviates"  # no effect is not left out any more
    assert said in {found, "inconclusive"} or (found, said) == ("reproduced", "consistent") or lost
    assert found != "inconclusive" or said == "inconclusive"
    low, high = claimed.band
    assert (found == "reproduced") == (low <= least and most <= high and claimed.has_effect(least, most))
