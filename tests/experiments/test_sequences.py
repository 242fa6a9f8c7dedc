"""Intervals over sequences: their coverage, what is paired with what, and what is refused."""

from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest

from repro.exflow.affinity import mutual_information
from repro.experiments.common import sequences
from repro.records import record


@pytest.fixture
def side(tmp_path):
    """Write a record for each series; returns their paths."""
    now = datetime(2026, 1, 1, tzinfo=UTC)
    metrics = {"crossing_fraction": record.Metric(value=0.5, unit="1")}
    made = iter(range(1000))

    def write(*tables):
        paths = []
        for table in tables:
            run = record.Record(
                experiment="exflow_placement",
                point={},
                repeat=0,
                seed=0,
                evidence="measured",
                status="ok",
                metrics=metrics,
                provenance=record.Provenance(start=now, end=now),
            )
            paths.append(tmp_path / f"{next(made)}.json")
            record.write(run, paths[-1], table)
        return paths

    return write


def rows(crossings, transitions, units=None, stratum=""):
    units = range(len(crossings)) if units is None else units
    return pd.DataFrame({"stratum": stratum, "unit": units, "crossings": crossings, "transitions": transitions})


def drawn(rng, units, rate, length=200, spread=0.12):
    """Per-unit transitions (unequal) and the crossings of two placements, whose rates go up and down together."""
    lengths = np.maximum(rng.lognormal(np.log(length), 0.6, units), 5).astype(int)
    own = rng.normal(0, spread, units) + 0.1 * (np.log(lengths / length))  # long sequences differ, too
    rates = [np.clip(mean + own * share, 0.02, 0.98) for mean, share in ((rate, 1.0), (0.75, 0.4))]
    return lengths, [rng.binomial(lengths, each) for each in rates]


def stacked(kind, rng, units):
    """Sums [units, 2 or 4] and strata of a rate, of two placements on the same sequences, or on different ones."""
    lengths, (ours, other) = drawn(rng, units, 0.3)
    if kind == "rate":
        return np.stack([ours, lengths], axis=1), np.zeros(units)
    if kind == "paired":
        return np.stack([ours, lengths, other, lengths], axis=1), np.zeros(units)
    more, (elsewhere, _) = drawn(rng, units // 2 + 8, 0.35)
    sums = np.zeros((units + len(more), 4))
    sums[:units, :2], sums[units:, 2:] = np.stack([ours, lengths], axis=1), np.stack([elsewhere, more], axis=1)
    return sums, np.arange(len(sums)) >= units


@pytest.mark.parametrize("units", [15, 60])
@pytest.mark.parametrize("kind", ["rate", "paired", "disjoint"])
def test_intervals_cover_as_often_as_they_say(kind, units):
    runs = 1000
    totals = stacked(kind, np.random.default_rng(10**6), 400_000)[0].sum(axis=0)
    true = totals[0] / totals[1] / (totals[2] / totals[3] if kind != "rate" else 1)
    hits = 0
    for run in range(runs):
        value, low, high = sequences.ratio_interval(*stacked(kind, np.random.default_rng(run), units))
        assert low <= value <= high
        hits += low <= true <= high
    assert 0.93 <= hits / runs <= 0.97


def test_mutual_information_is_covered_and_not_biased():
    """Of sequences that each prefer some pairs of 4 experts: the counted value is too high, by more than its error."""
    runs = 300
    joint, units = np.full(16, 0.03), 25
    joint[::5] = 0.16
    true = mutual_information(joint.reshape(1, 4, 4))[0][0]
    hits, over_a_constant, counted, corrected = 0, 0, [], []
    for run in range(runs):
        rng = np.random.default_rng(run)
        lengths = rng.integers(20, 120, units)
        counts = np.stack([rng.multinomial(length, rng.dirichlet(6 * joint)) for length in lengths]).reshape(-1, 4, 4)
        whole, left_out = counts.sum(axis=0)[None], counts.sum(axis=0) - counts
        counted.append(mutual_information(whole)[0][0])
        numbers = sequences.unbiased(counted[-1], mutual_information(left_out)[0], lengths, np.zeros(units))
        corrected.append(numbers[0])
        hits += numbers[1] <= true <= numbers[2]
        # As EX-F2 reads it: pseudo-values over one number, that of shuffled tokens.
        each = sequences.pseudo_values(counted[-1], mutual_information(left_out)[0], np.zeros(units))
        _, low, high = sequences.ratio_interval(np.stack([each, np.full(units, 0.05)], axis=1), np.zeros(units))
        over_a_constant += low <= true / 0.05 <= high
    assert 0.92 <= hits / runs <= 0.98 and 0.92 <= over_a_constant / runs <= 0.98
    assert np.mean(counted) > 1.06 * true and abs(np.mean(corrected) - true) < 0.03 * true


def test_unequal_units_widen_the_interval():
    """Ten units of which one has nine tenths of the tokens know less than ten equal ones."""
    left_out, strata = np.linspace(0, 1, 10), np.zeros(10)
    equal = sequences.half_width(left_out, np.ones(10), strata)
    assert sequences.half_width(left_out, np.array([81.0] + 9 * [1.0]), strata) > 1.2 * equal


def test_what_a_stratum_is_does_not_vary():
    """Two texts that differ, each the same throughout: their mix is fixed, so nothing is uncertain; unless it is not."""
    sums = np.repeat([[10.0, 100.0], [90.0, 100.0]], 8, axis=0)
    strata = np.repeat(["shakespeare", "python"], 8)
    assert sequences.ratio_interval(sums, strata) == pytest.approx((0.5, 0.5, 0.5))
    _, low, high = sequences.ratio_interval(sums, np.zeros(16))
    assert low < 0.4 and high > 0.6


def test_rate_of_one_side_and_its_complement(side):
    paths = side(rows([10, 30, 20], [100, 100, 100]))
    value, low, high = sequences.ratio([paths], "crossings", "transitions")
    assert value == pytest.approx(0.2) and low < 0.2 < high
    assert sequences.ratio([paths], "crossings", "transitions", complement=True)[0] == pytest.approx(0.8)
    assert sequences.ratio([paths], "crossings", "transitions", level=0.5)[1] > low


def test_placements_on_the_same_sequences_are_compared_sequence_by_sequence(side):
    """Twice the crossings in every sequence: the ratio is known however much sequences differ. Order does not matter."""
    ours, other = rows([10, 30, 60], [100, 100, 200]), rows([120, 20, 60], [200, 100, 100], units=[2, 0, 1])
    assert sequences.ratio([side(ours), side(other)], "crossings", "transitions") == pytest.approx((0.5, 0.5, 0.5))


def test_placements_on_different_sequences_are_compared_as_they_are(side):
    ours, elsewhere = rows([10, 30, 60], [100, 100, 200]), rows([10, 30, 60], [100, 100, 200], units=[7, 8, 9])
    value, low, high = sequences.ratio([side(ours), side(elsewhere)], "crossings", "transitions")
    assert value == pytest.approx(1.0) and low < 0.7 and high == pytest.approx(1 / low)


def test_a_sequence_of_several_seeds_counts_once(side):
    """The same record three times tells no more than once; other sequences do."""
    one, more = rows([10, 30, 20, 50], [100] * 4), rows([15, 35, 25, 45], [100] * 4, units=range(4, 8))
    once = sequences.ratio([side(one)], "crossings", "transitions")
    assert sequences.ratio([side(one, one, one)], "crossings", "transitions") == pytest.approx(once)
    twice = sequences.ratio([side(one, more)], "crossings", "transitions")
    assert twice[2] - twice[1] < 0.7 * (once[2] - once[1])


def test_a_single_sequence_has_no_interval(side):
    value, *ends = sequences.ratio([side(rows([10], [100]))], "crossings", "transitions")
    assert value == pytest.approx(0.1) and np.isnan(ends).all()


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (rows([1, 2], [9, 9]), rows([1, 2], [9, 9], units=[1, 2]), "2 and 2 units, 1 of them in both"),
        (rows([1, 2], [9, 9]), rows([1, 2], [9, 8]), "different sequences"),  # of as many seeds, other tokens
        (rows([1, 2], [9, 9]), rows([0, 0], [9, 9]), "is 0 or none"),
        (rows([1, 2], [9, 9]), rows([1, 2], [9, 9]).drop(columns="crossings"), "its series has no crossings"),
    ],
)
def test_what_cannot_be_compared_is_refused(side, first, second, says):
    with pytest.raises(ValueError, match=says):
        sequences.ratio([side(first), side(second)], "crossings", "transitions")


def test_a_side_without_records_is_refused(side):
    with pytest.raises(ValueError, match="none empty"):
        sequences.ratio([side(rows([1, 2], [9, 9])), []], "crossings", "transitions")
