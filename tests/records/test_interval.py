"""Median and interval over repeats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.records.interval import interval


def test_interval_is_seeded_and_does_not_depend_on_the_order():
    sample = [1.0, 5.0, 2.0, 4.0, 3.0]
    assert interval(sample) == interval(reversed(sample)) == interval(sample)
    middle, low, high = interval(sample)
    assert (middle, low, high) == (3.0, 1.0, 5.0)
    assert interval([7.0, 7.0, 7.0]) == (7.0, 7.0, 7.0)


def test_interval_of_one_value_has_no_ends_and_of_none_is_an_error():
    middle, low, high = interval([2.0])
    assert middle == 2.0 and math.isnan(low) and math.isnan(high)
    for wrong in ([], [math.nan], [math.inf, 1.0]):
        with pytest.raises(ValueError, match="needs at least one value"):
            interval(wrong)


def test_interval_covers_the_median_about_as_often_as_it_says():
    samples = np.random.default_rng(1).normal(10, 2, (200, 25))
    covered = sum(low <= 10 <= high for _, low, high in map(interval, samples))
    assert 0.88 <= covered / 200 <= 0.99


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=12))
def test_interval_lies_inside_the_sample_around_the_median(sample):
    middle, low, high = interval(sample)
    assert min(sample) <= low <= middle <= high <= max(sample)
