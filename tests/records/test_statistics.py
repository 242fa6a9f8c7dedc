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
@pytest.mark.parametrize("occasions", [3, statistics.OCCASIONS, 6])
@pytest.mark.parametrize("more", [1, 3])
def test_intervals_cover_what_they_claim(occasions, between, within, more):
    """19 times in 20 or more the interval holds the true value, and the prediction interval what so many `more` occasions
    show on average; 19 times where occasions differ more than their pairs. Four standard deviations of so many draws are allowed."""
    generator = np.random.default_rng(0)
    known = occasions_of(generator, occasions, 2, between, within).tolist()
    further = occasions_of(generator, more, 2, between, within).mean(axis=(1, 2)).tolist()
    covered, foreseen = map(np.mean, (_covered(known), _foreseen(known, further, more)))
    allowed = 4 * (0.95 * 0.05 / DRAWS) ** 0.5
    assert min(covered, foreseen) > 0.95 - allowed
    if between > within:
        assert max(covered, foreseen) < 0.95 + allowed


@pytest.mark.parametrize(("between", "within"), [(0.0, 0.1), (0.1, 0.1), (0.2, 0.02)])
def test_an_occasion_that_was_interrupted_lies_where_whole_ones_expect_it(between, within):
    """One pair, by occasions of two: its mean varies more, but where pairs are the larger part of the noise intervals are
    wider than they need to be."""
    generator = np.random.default_rng(0)
    known = occasions_of(generator, statistics.OCCASIONS, 2, between, within).tolist()
    further = occasions_of(generator, 1, 1, between, within).mean(axis=(1, 2)).tolist()
    assert np.mean(_foreseen(known, further)) > 0.95 - 4 * (0.95 * 0.05 / DRAWS) ** 0.5


def test_occasions_that_agree_by_chance_are_not_believed():
    """Where the means of occasions lie closer together than the pairs inside them let expect, an interval of the means
    alone is too narrow, and one can see it. Ours holds there too."""
    known = occasions_of(np.random.default_rng(0), 3, 2, 0.0, 0.1)
    inside, means = np.ptp(known, axis=2).mean(axis=1), known.mean(axis=2)
    chosen = means.std(axis=1) < inside / 6
    assert chosen.sum() > 400
    assert np.mean(_covered(known[chosen].tolist())) > 0.95
    assert np.mean(_covered([[[mean] for mean in each] for each in means[chosen].tolist()])) < 0.8


def _covered(known):
    return [low <= 0.3 <= high for _, low, high in map(statistics.mean_interval, known)]


def _foreseen(known, further, occasions=1):
    expected = [statistics.prediction_interval(each, occasions) for each in known]
    return [low <= value <= high for (low, high), value in zip(expected, further, strict=True)]


def test_pairs_of_one_occasion_taken_for_independent_would_cover_too_little():
    """Why occasions are averaged first: the state of the machine is the larger part of the noise."""
    pairs = occasions_of(np.random.default_rng(0), 3, 2, 0.1, 0.02).reshape(DRAWS, 6, 1).tolist()
    assert np.mean(_covered(pairs)) < 0.85


def test_one_value_has_no_interval():
    assert statistics.mean_interval([[2.0]]) == (2.0, -np.inf, np.inf)


def test_an_occasion_ends_with_an_hour_without_a_run():
    minutes = [0, 30, 59, 118, 179, 300]
    assert statistics.occasions([WHEN + timedelta(minutes=m) for m in minutes]) == [0, 0, 0, 0, 1, 2]
    assert statistics.occasions([WHEN + timedelta(minutes=m) for m in (300, 0, 0)]) == [1, 0, 0]
    assert statistics.occasions([]) == []
