"""Bounds: never above the optimum, and tight where they must be."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow import bound
from repro.exflow.bound import sdp
from repro.exflow.search import chain

SEED = st.integers(0, 10_000)
TINY = st.sampled_from([(2, 4, 2), (3, 4, 2), (3, 4, 4), (2, 6, 3), (2, 6, 2)])


@given(TINY, SEED)
@settings(max_examples=60, deadline=None)
def test_bounds_never_exceed_the_optimum(fewest_hops, make_counts, shape, seed):
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    best = fewest_hops(counts, gpus) / counts.sum()
    assert exflow.lower_bound(counts, gpus) <= best + 1e-9
    # Each part by itself too: on tiny instances the exact search hides them.
    for part in (
        lambda pairs: bound.b_matching(pairs, experts // gpus),
        lambda pairs: bound.spectrum(pairs, gpus),
    ):
        assert 1 - sum(map(part, counts)) / counts.sum() <= best + 1e-9


@given(SEED, st.sampled_from([1, 2, 3]))
@settings(max_examples=20, deadline=None)
def test_b_matching_is_the_min_cost_flow(make_counts, seed, degree):
    """Shortest augmenting paths against networkx's network simplex."""
    pairs = make_counts(seed, 2, 6)[0]
    graph = networkx.DiGraph()
    for e in range(6):
        graph.add_node(("from", e), demand=-degree)
        graph.add_node(("to", e), demand=degree)
        graph.add_edges_from([(("from", e), ("to", f), {"capacity": 1, "weight": -int(pairs[e, f])}) for f in range(6)])
    cost, _ = networkx.network_simplex(graph)
    assert bound.b_matching(pairs, degree) == pytest.approx(-cost)


@given(SEED)
@settings(max_examples=20, deadline=None)
def test_any_prices_bound_the_b_matching(make_counts, seed):
    """Weak duality: this is what makes the bound rigorous whatever the solver returns."""
    rng = np.random.default_rng(seed)
    pairs = make_counts(seed, 2, 6)[0]
    wrong = bound.dual_value(pairs, 2, rng.normal(0, 20, 6), rng.normal(0, 20, 6))
    assert wrong >= bound.b_matching(pairs, 2) - 1e-6


@given(TINY.filter(lambda shape: shape[1] > shape[2]), SEED, st.sampled_from([0.0, 0.002, 0.1]))
@settings(max_examples=40, deadline=None)
def test_semidefinite_bound_holds_however_early_it_stops(fewest_hops, make_counts, shape, seed, time_limit_s):
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    kept = counts.sum() - fewest_hops(counts, gpus)
    assert sdp.kept_bound(counts, gpus, time_limit_s) >= kept * (1 - 1e-9)


@given(TINY.filter(lambda shape: shape[1] > shape[2]), SEED)
@settings(max_examples=40, deadline=None)
def test_any_multipliers_bound_what_is_kept(fewest_hops, make_counts, shape, seed):
    """Weak duality: this is what makes the semidefinite bound rigorous whatever ADMM reached."""
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    rng = np.random.default_rng(seed)
    gains = sdp._symmetric(counts)
    multiplier, matrices = rng.normal(0, 10, (2, *gains.shape))
    multiplier += multiplier.transpose(0, 2, 1)
    prices = np.zeros((len(gains), *[2 * experts] * 3), np.float32)
    taken, paid = sdp.move_prices(prices, matrices + matrices.transpose(0, 2, 1), 2.0)
    assert paid > 0
    kept = counts.sum() - fewest_hops(counts, gpus)
    assert paid + sdp.dual_bound(multiplier, gains - taken, sdp.sums_to_zero(experts), gpus) >= kept


def test_semidefinite_bound_beats_the_others_and_grows_with_time(make_trace):
    counts = exflow.transitions(exflow.Trace(make_trace(5, 16, 20_000, alpha=1.0), 16))
    found = exflow.evaluate(exflow.place(counts, 4, rounds=5), counts).crossing_fraction
    fast, slow = exflow.lower_bound(counts, 4), exflow.lower_bound(counts, 4, time_limit_s=2.0)
    assert fast + 0.02 < slow <= found
    assert exflow.gap(found, slow) < 0.1
    assert fast <= exflow.lower_bound(counts, 4, time_limit_s=0.01) <= slow + 1e-6


def test_semidefinite_bound_is_near_the_exact_optimum(make_trace):
    """A few percent below the optimum, which Viterbi knows here."""
    counts = exflow.transitions(exflow.Trace(make_trace(6, 8, 20_000, alpha=1.0), 8))
    for gpus, lacks in ((4, 0.05), (2, 0.02)):
        optimum = exflow.lower_bound(counts, gpus)
        semidefinite = 1 - sdp.kept_bound(counts, gpus, 3.0) / counts.sum()
        assert (1 - lacks) * optimum <= semidefinite <= optimum


def test_tight_with_one_expert_per_gpu(make_counts):
    counts = make_counts(0, 6, 16)
    placement = exflow.place(counts, 16)
    assert placement.optimal
    assert exflow.evaluate(placement, counts).crossing_fraction == pytest.approx(exflow.lower_bound(counts, 16))


def test_below_every_placement_found(make_counts):
    counts = make_counts(1, 8, 32)
    for gpus in (2, 4, 8, 16):
        found = exflow.evaluate(exflow.place(counts, gpus, rounds=5), counts).crossing_fraction
        assert 0 <= exflow.lower_bound(counts, gpus) <= found


def test_uniform_routing_leaves_nothing_to_gain():
    """With no affinity every placement crosses 1 - 1/gpus, and the bound proves it."""
    counts = np.ones((3, 32, 32))
    for gpus in (2, 4, 8):
        crossing = exflow.evaluate(exflow.place(counts, gpus, method="contiguous"), counts).crossing_fraction
        assert crossing == pytest.approx(1 - 1 / gpus) == exflow.lower_bound(counts, gpus)
        assert exflow.gap(crossing, exflow.lower_bound(counts, gpus)) == pytest.approx(0, abs=1e-9)


def test_gap_is_a_share_of_the_crossings():
    assert exflow.gap(0.5, 0.4) == pytest.approx(0.2)
    assert exflow.gap(0.0, 0.0) == 0.0


def test_exact_where_all_partitions_are_few(make_counts):
    counts = make_counts(3, 10, 8)
    best = exflow.evaluate(exflow.place(counts, 4), counts).crossing_fraction
    assert exflow.lower_bound(counts, 4) == pytest.approx(best)
    assert chain.count_partitions(8, 4) == 105


def test_uneven_gpus_are_refused():
    with pytest.raises(ValueError, match="8 experts per layer cannot be shared evenly by 3"):
        exflow.lower_bound(np.ones((1, 8, 8)), 3)


def test_no_tokens_and_negative_time_are_refused():
    with pytest.raises(ValueError, match="not all zero"):
        exflow.lower_bound(np.zeros((1, 8, 8)), 2)
    with pytest.raises(ValueError, match="time_limit_s is -1"):
        exflow.lower_bound(np.ones((1, 8, 8)), 2, -1)
