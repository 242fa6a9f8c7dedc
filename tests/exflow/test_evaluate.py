"""Hops, counted token by token in plain Python, against the fast count."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow.evaluate import crossings, distances, total_cost
from repro.exflow.placement import Placement


def dispatched(trace, gpu, gpus, per_node):
    """Send every token through the layers: (intra, inter) hops a token, as published, and the GPU loads."""
    intra = inter = 0
    load = np.zeros((len(gpu), gpus))
    for token in trace.tolist():
        here = None
        for layer, expert in enumerate(token):
            there = int(gpu[layer][expert])
            load[layer, there] += 1
            if here is not None and here != there:
                if here // per_node == there // per_node:
                    intra += 1
                else:
                    inter += 1
            here = there
    return intra / len(trace), inter / len(trace), load


@given(st.integers(0, 999), st.sampled_from([(4, 4), (4, 2), (2, 2), (2, 1), (1, 1)]), st.integers(2, 5))
@settings(deadline=None)
def test_hops_and_load_equal_dispatch_by_token(seed, machine, layers):
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    trace = rng.integers(0, 8, (30, layers))
    gpu = np.stack([rng.permutation(np.repeat(np.arange(gpus), 8 // gpus)) for _ in range(layers)])
    intra, inter, load = dispatched(trace, gpu, gpus, per_node)
    cost = exflow.evaluate(Placement(gpu, gpus, per_node, "random"), exflow.Trace(trace, 8))
    assert cost.intra_hops == pytest.approx(intra) and cost.inter_hops == pytest.approx(inter)
    assert cost.hops_per_token == pytest.approx(intra + inter)
    assert cost.weighted_hops == pytest.approx(intra + 2 * inter)
    assert cost.crossing_fraction == pytest.approx((intra + inter) / (layers - 1))
    assert cost.node_crossing_fraction == pytest.approx(inter / (layers - 1))
    share = load.max(axis=1) * gpus / len(trace)
    assert cost.max_load == pytest.approx(share.mean()) and cost.max_load_worst_layer == pytest.approx(share.max())


def test_top_k_pairs_weigh_one_per_token():
    trace = exflow.Trace(np.array([[[0, 1], [2, 3]]]), 4)  # one token, two experts in each layer
    gpu = np.array([[0, 0, 1, 1], [1, 1, 0, 1]])
    cost = exflow.evaluate(Placement(gpu, 2, 2, "random"), trace)
    assert cost.hops_per_token == pytest.approx(0.5)  # of its four pairs, two cross
    assert cost.max_load == pytest.approx((2.0 + 1.0) / 2)  # all of it on GPU 0, then half on each


def test_mismatch_is_told():
    placement = Placement(np.zeros((3, 4), int), 1, 1, "contiguous")
    with pytest.raises(ValueError, match="3 layers of 4 experts, the routing has 2 of 4"):
        exflow.evaluate(placement, np.ones((1, 4, 4)))
    for counts in (np.zeros((2, 4, 4)), np.full((2, 4, 4), np.nan), np.ones((2, 3, 4)), np.ones((2, 4, 4)).tolist()):
        with pytest.raises(ValueError, match="transition counts"):
            exflow.evaluate(placement, counts)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_counts_of_any_dtype_are_summed_without_loss(dtype):
    counts = np.full((2, 64, 64), 2047, dtype)  # 8 million tokens: beyond what a float16 holds
    counts[0, 0, 1:] += 1
    wide, gpu = counts.astype(float), np.arange(192).reshape(3, 64) % 64
    placement = Placement(gpu, 64, 64, "contiguous")
    assert exflow.evaluate(placement, counts) == exflow.evaluate(placement, wide)
    assert exflow.lower_bound(counts, 64) == exflow.lower_bound(wide, 64)


def test_distances_are_level_costs():
    assert distances(4, 2).tolist() == [[0, 1, 2, 2], [1, 0, 2, 2], [2, 2, 0, 1], [2, 2, 1, 0]]
    counts = np.full((1, 4, 4), 1.0)
    assert total_cost(counts, np.array([[0, 1, 2, 3]] * 2), distances(4, 2)) == 4 * (1 + 2 + 2)


def test_crossings_of_each_token_sum_to_the_hops():
    rng = np.random.default_rng(0)
    trace, gpu = exflow.Trace(rng.integers(0, 8, (30, 5)), 8), np.stack([rng.permutation(8) for _ in range(5)])
    placement = Placement(gpu, 8, 4, "random")
    cost = exflow.evaluate(placement, trace)
    assert crossings(placement.gpu, trace).mean() == pytest.approx(cost.hops_per_token)
    assert crossings(placement.node, trace).mean() == pytest.approx(cost.inter_hops)
    by_hand = [
        sum(gpu[layer][token[layer]] != gpu[layer + 1][token[layer + 1]] for layer in range(4))
        for token in trace.experts
    ]
    assert crossings(placement.gpu, trace).tolist() == by_hand
