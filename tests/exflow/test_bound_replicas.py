"""Bounds for placements with copies of experts: never above the optimum, however early they were stopped."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow.bound import sdp

SEED = st.integers(0, 10_000)
SHAPES = st.sampled_from([(4, 2, 2), (4, 2, 3), (3, 3, 2), (4, 3, 2), (3, 2, 3)])  # experts, GPUs, held by each


def fewest_hops(counts, gpus, held):
    """Optimum by brute force over all sets of experts that GPUs may hold; the order of the GPUs is free in layer 0."""
    experts = counts.shape[1]
    sets = list(itertools.combinations(range(experts), min(held, experts)))
    rows = [row for row in itertools.product(sets, repeat=gpus) if set().union(*row) == set(range(experts))]
    on = np.zeros((len(rows), gpus, experts), bool)
    for own, row in zip(on, rows, strict=True):
        for gpu, each in enumerate(row):
            own[gpu, list(each)] = True
    first = [r for r, row in enumerate(rows) if list(row) == sorted(row)]
    total = np.full(len(rows), np.inf)
    total[first] = 0.0
    for pairs in counts:
        apart = ~np.einsum("sga,tgb->stab", on, on)
        total = (total[:, None] + (apart * pairs).sum(axis=(2, 3))).min(axis=0)
    return total.min()


@given(SHAPES, SEED, st.sampled_from([2, 3]), st.sampled_from([0, 1, 10]))
@settings(max_examples=25, deadline=None)
def test_never_exceeds_the_optimum(make_counts, shape, seed, layers, looks):
    experts, gpus, held = shape
    counts = make_counts(seed, layers, experts)
    best = fewest_hops(counts, gpus, held)
    assert exflow.replicated_bound(counts, gpus, held, time_limit_s=0.1) <= best / counts.sum() + 1e-9
    if gpus * held > experts:
        left = iter([1e9] * (25 * looks + 1) * len(counts))
        kept = sdp.kept_bound_of_copies(counts, gpus, held, lambda: next(left, 0.0))
        assert counts.sum() - best <= kept and (kept < np.inf) == (looks > 0)


def test_below_what_was_found_and_falling_with_slots(make_trace):
    trace = exflow.Trace(make_trace(6, 16, 5_000), 16)
    counts = exflow.transitions(trace)
    placement = exflow.place(counts, 4, rounds=5)
    bounds = []
    for extra in (1, 2, 3):
        placed = exflow.place_replicas(placement, trace, extra, "hops")
        found = exflow.evaluate_replicas(placed, trace).hops_per_token / 5
        left = iter([1e9] * 300 * len(counts))
        bounds.append(exflow.replicated_bound(counts, 4, 4 + extra, clock=lambda left=left: next(left, 0.0)))
        assert bounds[-1] <= found
    assert bounds == sorted(bounds, reverse=True) and bounds[0] > 0.1
    assert exflow.replicated_bound(counts, 4, 4, 0.0) == exflow.lower_bound(counts, 4)


def test_nothing_is_proved_without_time_or_where_all_hold_all(make_counts):
    counts = make_counts(0, 3, 8)
    assert exflow.replicated_bound(counts, 4, 3, time_limit_s=0.0) == 0.0
    assert exflow.replicated_bound(counts, 4, 8) == 0.0 == exflow.replicated_bound(counts, 1, 8)


def test_unusable_arguments_are_refused(make_counts):
    counts = make_counts(0, 3, 8)
    with pytest.raises(ValueError, match="3 GPUs with 2 experts of a layer each cannot hold all 8"):
        exflow.replicated_bound(counts, 3, 2)
    with pytest.raises(ValueError, match="time_limit_s is -1"):
        exflow.replicated_bound(counts, 4, 3, -1.0)
