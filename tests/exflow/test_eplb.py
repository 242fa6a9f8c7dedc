"""The baseline EPLB: the published example, and what its rules promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.exflow.serving.eplb import rebalance_experts

# The example of EPLB's README: two layers of 12 experts in 4 groups, 16 slots on 2 nodes of 4 GPUs.
WEIGHT = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
PUBLISHED = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_published_example():
    slots, places, counts = rebalance_experts(WEIGHT, 16, 4, 2, 8)
    np.testing.assert_array_equal(slots, PUBLISHED)
    assert counts[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert places[0, 5].tolist() == [0, 2] and places[0, 0].tolist() == [12, -1]


@given(st.integers(0, 9999), st.sampled_from([(32, 8, 2, 8), (40, 8, 4, 8), (48, 3, 2, 8), (32, 1, 1, 16)]))
@settings(max_examples=40, deadline=None)
def test_slots_copies_and_nodes(seed, machine):
    """Every slot is listed once under its expert; copies differ by load; with as many groups as divide, each stays on
    one node."""
    replicas, groups, nodes, gpus = machine
    weight = np.random.default_rng(seed).random((3, 24))
    if replicas == 32 and groups == 1:
        weight = np.random.default_rng(seed).random((3, 32))
    slots, places, counts = rebalance_experts(weight, replicas, groups, nodes, gpus)
    assert slots.shape == (3, replicas) and places.shape == (*weight.shape, counts.max())
    for layer, row in enumerate(places):
        assert (counts[layer] == (row >= 0).sum(axis=1)).all()
        for expert, own in enumerate(row):
            assert (slots[layer][own[own >= 0]] == expert).all()
        assert sorted(row[row >= 0]) == list(range(replicas))
        node = row[:, 0] * nodes // replicas if groups % nodes == 0 else np.zeros(len(row), int)
        heat, less = weight[layer] / counts[layer], weight[layer] / np.maximum(counts[layer] - 1, 1)
        for each in set(node.tolist()):  # no copy would have served another expert better
            more = (node == each) & (counts[layer] > 1)
            assert heat[node == each].max() <= less[more].min(initial=np.inf)
    assert counts.sum() == 3 * replicas and counts.min() >= 1
    if groups % nodes == 0:
        node = np.repeat(np.arange(nodes), replicas // nodes)
        for row in slots:
            for group in range(groups):
                assert len(set(node[row // (weight.shape[1] // groups) == group])) == 1


def test_wrong_sizes_are_refused():
    for wrong, message in (
        ((17, 1, 1, 8), "17 slots cannot be shared evenly by 8"),
        ((8, 1, 1, 8), "8 slots cannot hold 12 experts"),
        ((16, 5, 1, 8), "12 experts cannot be shared evenly by 5"),
        ((16, 4, 2, 0), "16 slots cannot be shared evenly by 0"),
    ):
        with pytest.raises(ValueError, match=message):
            rebalance_experts(WEIGHT, *wrong)
    with pytest.raises(ValueError, match="not negative"):
        rebalance_experts(-WEIGHT, 16, 1, 1, 8)
