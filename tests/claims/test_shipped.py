"""A run with too few pairs for a verdict is compared with the shipped ones."""

import pytest
from claims_made_up import TIMED, claim, named, occasions, pair

from repro.claims import registry, shipped


def beside(ours, theirs, **changes):
    one = claim(**changes)
    here, known = (registry.evaluate([one], named(*runs)) for runs in (ours, theirs))
    return shipped.compare([one], here, known)[one.id]


SHIPPED = occasions([[2.0, 2.0], [1.8, 1.9], [2.2, 2.1]])


@pytest.mark.parametrize(("ratios", "agrees"), [([2.1, 1.8], True), ([2.4, 2.3], True), ([3.5, 3.6], False)])
def test_one_occasion_agrees_where_the_shipped_occasions_expect_it(ratios, agrees):
    found = beside(occasions([ratios]), SHIPPED, value=TIMED)
    assert found.agrees is agrees and found.said.startswith("inside [" if agrees else "outside [")
    assert found.shipped == f"consistent{registry.OLDER} (paper's setting)"


def test_more_occasions_are_expected_nearer_to_the_shipped_mean():
    one = claim(value=TIMED)
    known = registry.evaluate([one], named(*SHIPPED))[0]
    (low, high), (lower, higher) = (shipped.expected(one.value, known, many) for many in (3, 1))
    assert lower < low < 2.0 < high < higher


def test_what_cannot_be_compared_says_why():
    assert beside([], SHIPPED, value=TIMED).said == "not run"
    assert beside(SHIPPED, [], value=TIMED).said == "nothing shipped"
    few = beside(SHIPPED, occasions([[2.0, 2.0]]), value=TIMED)
    assert (
        few.agrees is None and few.said == "too few shipped runs to tell (2 of 6 interleaved pairs, on 1 occasion of 3)"
    )
    other = beside(occasions([[2.0]], evidence="emulated"), SHIPPED, value=TIMED)
    assert other.agrees is None and other.said == "emulated, shipped is measured"


def test_what_no_clock_measures_is_the_same_or_another():
    assert beside(pair(1.0), pair(1.0)).said == "the same value"
    assert beside(pair(1.0), pair(1.1)).agrees is False
