"""Affinity: conditional routing and mutual information of routings whose answer is known."""

import numpy as np
import pytest

from repro import exflow


def test_conditional_rows_are_probabilities():
    counts = np.array([[[3.0, 1.0], [0.0, 0.0]]])
    np.testing.assert_allclose(exflow.affinity.conditional(counts), [[[0.75, 0.25], [0.0, 0.0]]])


def test_known_information():
    determined, independent = np.eye(4)[None] * 5, np.ones((1, 4, 4))
    bits, share = exflow.affinity.mutual_information(np.concatenate([determined, independent]))
    np.testing.assert_allclose(bits, [2.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(share, [1.0, 0.0], atol=1e-12)


def test_textbook_example():
    """I = Σ p log2 p/(p·p) of the joint [[1/2, 1/4], [0, 1/4]], summed by hand."""
    bits, _ = exflow.affinity.mutual_information(np.array([[[2.0, 1.0], [0.0, 1.0]]]))
    expected = (
        0.5 * np.log2(0.5 / (0.75 * 0.5)) + 0.25 * np.log2(0.25 / (0.75 * 0.5)) + 0.25 * np.log2(0.25 / (0.25 * 0.5))
    )
    assert bits[0] == pytest.approx(expected)


def test_control_keeps_loads_and_drops_links(make_trace):
    trace = exflow.Trace(make_trace(5, 8, 4000), 8)
    control = exflow.affinity.shuffled(trace, 0)
    for layer in range(5):
        np.testing.assert_array_equal(
            np.bincount(control.experts[:, layer], minlength=8), np.bincount(trace.experts[:, layer], minlength=8)
        )
    found = exflow.measure_affinity(trace)
    bias = (8 - 1) ** 2 / (2 * 4000 * np.log(2))  # what the plug-in estimate shows where there is nothing
    assert (found.shuffled_bits < 3 * bias).all() and (found.bits > 50 * bias).all()


def test_more_draws_of_the_control_agree_better(make_trace):
    trace = exflow.Trace(make_trace(5, 8, 1000), 8)
    once, often = (
        [exflow.measure_affinity(trace, seed, shuffles).shuffled_bits.mean() for seed in range(12)]
        for shuffles in (1, 32)
    )
    assert np.std(often) < np.std(once) / 2
    assert np.mean(often) == pytest.approx(np.mean(once), rel=0.1)
    with pytest.raises(ValueError, match="shuffles is 0"):
        exflow.measure_affinity(trace, shuffles=0)


def test_top_k_control_moves_whole_sets():
    experts = np.arange(40).reshape(10, 2, 2) % 4
    control = exflow.affinity.shuffled(exflow.Trace(experts, 4), 1)
    assert {tuple(row) for row in control.experts[:, 0]} == {tuple(row) for row in experts[:, 0]}


def test_a_unit_left_out_is_as_if_it_had_not_been_recorded(make_trace):
    trace = exflow.Trace(make_trace(4, 8, 300), 8)
    units = np.repeat([7, 3, 5], [100, 150, 50])
    bits, share = exflow.affinity.without_each(trace, units)
    for row, unit in enumerate((3, 5, 7)):
        counts = exflow.transitions(trace.take(units != unit))
        np.testing.assert_allclose((bits[row], share[row]), exflow.affinity.mutual_information(counts))
