"""Intervals have the coverage that they claim, and occasions are told apart by the clock."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from repro.records import statistics

DRAWS = 4000
WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def occasions_of(generator, occasions, pairs, between, within):
    """Logarithms of ratios: each occasion has a state of its own, each pair noise."""
    states = generator.normal(0.3, between, (DRAWS, occasions, 1))
    return states + generator.normal(0, within, (DRAWS, occasions, pairs))


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.1), (0.1, 0.1), (0.2, 0.02)])
@pytest.mark.parametrize("occasions", [3, 6])
def test_intervals_cover_what_they_claim(occasions, between, within):
    """19 times in 20 the t-interval of the means of occasions holds the true value, and the prediction interval what a
    further occasion shows; four standard deviations of so many draws are allowed."""
    generator = np.random.default_rng(0)
    means = occasions_of(generator, occasions, 2, between, within).mean(axis=2).tolist()
    further = occasions_of(generator, 1, 2, between, within).mean(axis=(1, 2)).tolist()
    found = [statistics.mean_interval(each) for each in means]
    covered = np.mean([low <= 0.3 <= high for _, low, high in found])
    predicted = [statistics.prediction_interval(each) for each in means]
    foreseen = np.mean([low <= value <= high for (low, high), value in zip(predicted, further, strict=True)])
    allowed = 4 * (0.95 * 0.05 / DRAWS) ** 0.5
    assert covered == pytest.approx(0.95, abs=allowed) and foreseen == pytest.approx(0.95, abs=allowed)


def test_pairs_of_one_occasion_taken_for_independent_would_cover_too_little():
    """Why occasions are averaged first: the state of the machine is the larger part of the noise."""
    generator = np.random.default_rng(0)
    pairs = occasions_of(generator, 3, 2, 0.1, 0.02).reshape(DRAWS, 6).tolist()
    found = [statistics.mean_interval(each) for each in pairs]
    assert np.mean([low <= 0.3 <= high for _, low, high in found]) < 0.85


def test_one_value_has_no_interval():
    assert statistics.mean_interval([2.0]) == (2.0, -np.inf, np.inf)


def test_an_occasion_ends_with_an_hour_without_a_run():
    minutes = [0, 30, 59, 118, 179, 300]
    assert statistics.occasions([WHEN + timedelta(minutes=m) for m in minutes]) == [0, 0, 0, 0, 1, 2]
    assert statistics.occasions([WHEN + timedelta(minutes=m) for m in (300, 0, 0)]) == [1, 0, 0]
    assert statistics.occasions([]) == []
