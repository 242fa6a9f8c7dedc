"""Bounds: never above the optimum, and tight where they must be."""

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow import _chain, bound

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
    """The linear program against networkx's network simplex."""
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
    assert _chain.count_partitions(8, 4) == 105


def test_uneven_gpus_are_refused():
    with pytest.raises(ValueError, match="8 experts per layer cannot be shared evenly by 3"):
        exflow.lower_bound(np.ones((1, 8, 8)), 3)
