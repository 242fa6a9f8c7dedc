"""The prompt tokens of a pass: learnt from the times of passes, towards the number that takes four fifths of the gap."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.flover.budget import AIM, FIRST, LEAST, Budget


@given(
    gap=st.floats(0.01, 1),
    fixed=st.floats(0, 0.7),  # of the gap
    token=st.floats(1e-5, 1e-2),
    begin=st.integers(LEAST, 10_000),
)
def test_the_budget_goes_to_what_meets_the_aim_and_never_past_it(gap, fixed, token, begin):
    best = max(LEAST, (AIM - fixed) * gap / token)
    budget = Budget(gap)
    budget.tokens = begin
    above = begin > best
    for _ in range(120):
        budget.timed(budget.tokens, fixed * gap + token * budget.tokens)
        assert math.floor(budget.tokens) >= math.floor(best) - 1 if above else budget.tokens <= best + 1
    # By 1 - 0.7/0.8 of the distance a pass at worst, and in whole tokens downwards.
    assert budget.tokens == pytest.approx(best, rel=0.02, abs=10)


def test_a_pass_that_was_not_full_changes_nothing_that_it_does_not_know():
    budget = Budget(0.2)
    budget.timed(1, 0.05)  # 3 tokens would have met the aim, at this pace; more may, since most of it was not the token
    assert budget.tokens == FIRST
    budget.timed(0, 5.0)  # decoding alone, which no budget makes faster
    assert budget.tokens == FIRST
    budget.timed(20, 0.01)  # 320 would have met the aim: half way there
    assert budget.tokens == 192
    budget.timed(192, 0.32)
    assert budget.tokens == 96


def test_one_slow_pass_halves_the_budget_at_most():
    budget = Budget(0.2)
    budget.tokens = 512
    budget.timed(512, 30.0)  # another program had the machine
    assert budget.tokens == 256
    budget.timed(3, 0.4)  # most of it was not the prompt
    assert budget.tokens == 128


def test_prompts_go_on_where_decoding_alone_takes_too_long():
    budget = Budget(0.2)
    for _ in range(5):
        budget.timed(budget.tokens, 3.0)
    assert budget.tokens == LEAST


def test_without_a_gap_there_is_no_limit():
    budget = Budget(0.0)
    budget.timed(10_000, 60.0)
    assert budget.tokens == sys.maxsize


def test_a_clock_that_stands_still_says_nothing():
    budget = Budget(0.2)
    budget.timed(64, 0.0)
    assert budget.tokens == FIRST


@pytest.mark.parametrize(("gap", "seconds"), [(sys.float_info.max, 1.0), (sys.float_info.max, 1e-9), (1e9, 5e-324)])
def test_the_largest_gap_is_as_good_as_none(gap, seconds):
    """Though the number that meets it is infinite in floating point."""
    budget = Budget(gap)
    for _ in range(70):
        budget.timed(64, seconds)
    assert sys.maxsize - 70 < budget.tokens <= sys.maxsize
