"""Synthetic traces: the processes that they claim to be, seeded and held out by construction."""

import numpy as np
import pytest
from placement_solvers import synthetic

from repro import exflow


def draws(tokens=500, seed=3):
    return {
        "markov": synthetic.markov(4, 8, tokens, alpha=0.5, skew=0.3, seed=seed),
        "topic": synthetic.topic(4, 8, tokens, seed=seed),
        "topic_top_k": synthetic.topic_top_k(4, 8, tokens, 3, seed=seed),
    }


def test_same_seed_same_trace_and_more_tokens_continue_it():
    first, again, longer, other = draws(), draws(), draws(tokens=900), draws(seed=4)
    for name, trace in first.items():
        assert np.array_equal(trace.experts, again[name].experts)
        assert np.array_equal(trace.experts, longer[name].experts[:500])
        assert not np.array_equal(trace.experts, other[name].experts)


def test_numpys_global_generator_is_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    draws(tokens=5)
    assert np.array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_ids_fit_the_smallest_type(experts, dtype):
    trace = synthetic.markov(2, experts, 50)
    assert trace.experts.dtype == dtype and trace.experts.shape == (50, 2) and trace.num_experts == experts


def test_top_k_experts_differ():
    trace = draws()["topic_top_k"]
    assert trace.experts.shape == (500, 4, 3)
    assert (np.diff(np.sort(trace.experts, axis=2), axis=2) > 0).all()


def test_sinkhorn_meets_both_margins():
    rng = np.random.default_rng(0)
    rows, columns = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(9))
    chances = synthetic.balanced(rng.gamma(0.5, 1.0, (6, 9)) + 0.01, rows, columns)
    assert chances.sum(axis=1) == pytest.approx(1.0)
    assert rows @ chances == pytest.approx(columns, rel=1e-6)


def test_markov_has_no_memory_and_the_popularity_asked_for():
    """The layer before the last says nothing about the next, given the last; every expert is about equally popular."""
    trace = synthetic.markov(3, 4, 200_000, alpha=1.0, seed=1)
    joint = np.zeros((4, 4, 4))
    np.add.at(joint, tuple(trace.experts.T), 1)
    given_last = joint.sum(axis=0) / joint.sum(axis=(0, 2))[:, None]
    expected = joint.sum(axis=2)[:, :, None] * given_last[None]
    assert (np.abs(joint - expected) < 5 * np.sqrt(expected) + 5).all()
    assert np.bincount(trace.experts[:, 2]) / 50_000 == pytest.approx(1.0, abs=0.02)
    assert joint.sum(axis=0).std() > 1000  # and it is not uniform


def test_skew_is_skew():
    loads = [np.bincount(synthetic.markov(2, 16, 20_000, skew=skew, seed=2).experts[:, 0]) for skew in (0.0, 1.0)]
    assert loads[0].max() < 1.15 * 1250 and loads[1].max() > 2 * 1250


def test_smaller_alpha_is_stronger_affinity():
    shares = [
        exflow.transitions(synthetic.markov(3, 8, 20_000, alpha=alpha, seed=1)).max(axis=2).sum() / 40_000
        for alpha in (0.1, 1.0, 100.0)
    ]
    assert shares[0] > shares[1] > shares[2] and shares[2] < 0.2  # the most likely next expert of 8


@pytest.mark.parametrize("k", [None, 1])
def test_a_topic_that_stays_ties_all_layers_and_one_that_leaves_ties_none(k):
    def information(stay, first, last):
        """Mutual information of two layers' experts, in bits, from 40,000 tokens (bias below 0.002)."""
        arguments = {"topics": 4, "alpha": 0.1, "stay": stay, "seed": 5}
        trace = (
            synthetic.topic(6, 8, 40_000, **arguments)
            if k is None
            else synthetic.topic_top_k(6, 8, 40_000, k, **arguments)
        )
        joint = np.zeros((8, 8))
        ids = trace.experts.reshape(40_000, 6)
        np.add.at(joint, (ids[:, first], ids[:, last]), 1 / 40_000)
        even = joint.sum(axis=1)[:, None] * joint.sum(axis=0)
        return float((joint[joint > 0] * np.log2(joint[joint > 0] / even[joint > 0])).sum())

    assert information(0.0, 0, 5) < 0.005
    assert information(1.0, 0, 5) == pytest.approx(information(1.0, 0, 1), rel=0.5) and information(1.0, 0, 5) > 0.5
    assert 0.01 < information(0.8, 0, 5) < 0.6 * information(0.8, 0, 1)


def test_top_k_draws_first_by_the_topics_weights():
    """With one topic, every choice has the balanced weights' distribution, which is even."""
    trace = synthetic.topic_top_k(2, 4, 40_000, 2, topics=1, seed=1)
    for choice in range(2):
        assert np.bincount(trace.experts[:, 1, choice]) / 10_000 == pytest.approx(1.0, abs=0.05)


def test_published_shape_reproduces_the_cut_of_rank_order():
    """The Mixtral-shaped instance that the benchmark and its notes speak of stays the same from release to release."""
    counts = exflow.transitions(synthetic.markov(32, 8, 50_000, alpha=1.0, seed=1))
    cost = exflow.evaluate(exflow.place(counts, 4, method="contiguous"), counts)
    assert cost.crossing_fraction == pytest.approx(0.7503, abs=5e-5)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: synthetic.markov(1, 8, 10),
        lambda: synthetic.markov(2, 0, 10),
        lambda: synthetic.markov(2, 8, 0),
        lambda: synthetic.markov(2, 8, 10, alpha=0.0),
        lambda: synthetic.topic(2, 8, 10, topics=0),
        lambda: synthetic.topic(2, 8, 10, stay=1.5),
        lambda: synthetic.topic_top_k(2, 8, 10, 9),
        lambda: synthetic.topic_top_k(2, 8, 10, 0),
    ],
)
def test_bad_sizes_are_refused(bad):
    with pytest.raises(ValueError, match=r"found|allowed|probability"):
        bad()
