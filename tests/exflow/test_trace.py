"""Traces: reading, refusing bad ones by row, splitting by whole sequences, counting transitions."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow, paths
from repro.exflow import trace as module


def counted(experts, num_experts):
    """Transition counts by the definition: token by token."""
    experts = experts[:, :, None] if experts.ndim == 2 else experts
    counts = np.zeros((experts.shape[1] - 1, num_experts, num_experts))
    for token in experts:
        for layer in range(len(token) - 1):
            for a in token[layer]:
                for b in token[layer + 1]:
                    counts[layer, a, b] += 1 / experts.shape[2] ** 2
    return counts


@given(st.integers(1, 12), st.integers(2, 4), st.integers(1, 3), st.integers(0, 99), st.integers(1, 5))
@settings(deadline=None)
def test_transitions_by_definition_in_blocks_of_any_size(tokens, layers, k, seed, block):
    experts = np.random.default_rng(seed).integers(0, 5, (tokens, layers, k)).astype(np.uint8)
    before, module.BLOCK = module.BLOCK, block
    try:
        counts = exflow.transitions(exflow.Trace(experts, 5))
    finally:
        module.BLOCK = before
    np.testing.assert_allclose(counts, counted(experts, 5))
    np.testing.assert_allclose(counts.sum(axis=(1, 2)), tokens)


def test_all_formats_read_the_same(tmp_path, make_trace):
    experts = make_trace(4, 8, 50)
    np.save(tmp_path / "t.npy", experts.astype(np.int16))
    np.savez(tmp_path / "t.npz", experts=experts.astype(np.uint8), seq_len=np.array([20, 30]), num_experts=8)
    table = pd.DataFrame(experts, columns=[f"layer{i}" for i in range(4)])
    table.assign(sequence=np.repeat([7, 9], [20, 30])).to_parquet(tmp_path / "t.parquet")
    read = [exflow.load_trace(tmp_path / f"t.{kind}", num_experts=8) for kind in ("npy", "npz", "parquet")]
    for trace in read:
        np.testing.assert_array_equal(trace.experts, experts)
        assert trace.num_experts == 8 and trace.k == 1
    assert read[0].sequences is None
    for trace in read[1:]:
        assert np.unique(trace.sequences, return_counts=True)[1].tolist() == [20, 30]


def test_weights_follow_their_tokens_and_experts():
    experts = np.array([[[3, 1], [0, 2]], [[2, 0], [1, 3]]])
    trace = exflow.Trace(experts, 4, np.array([0, 1]), weights=experts / 10)
    for part in (trace.top(1), trace.take(np.array([1])), trace.take(np.array([1])).top(1)):
        np.testing.assert_allclose(part.weights, part.experts / 10)
        assert part.weights.shape == part.experts.shape
    with pytest.raises(ValueError, match=r"weights \(2, 2\) for experts \(2, 2, 2\)"):
        exflow.Trace(experts, 4, weights=np.zeros((2, 2)))


def test_top_k_keeps_the_first_experts():
    experts = np.random.default_rng(0).integers(0, 8, (10, 3, 4))
    trace = exflow.Trace(experts, 8)
    np.testing.assert_array_equal(trace.top(1).experts, experts[:, :, 0])
    np.testing.assert_array_equal(trace.top(2).experts, experts[:, :, :2])
    with pytest.raises(ValueError, match="top-5 asked of a top-4 trace"):
        trace.top(5)


BAD = {
    "negative": (lambda t: t.__setitem__((70_000, 1), -1), r"row 70000, layer 1: expert -1 is not in 0..7"),
    "too high": (lambda t: t.__setitem__((3, 0), 8), r"row 3, layer 0: expert 8"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_first_bad_row_is_named(tmp_path, mistake):
    change, message = BAD[mistake]
    experts = np.zeros((70_002, 3), np.int32)
    experts[70_001] = -5  # a later bad row is not the one to name
    change(experts)
    np.save(tmp_path / "bad.npy", experts)
    with pytest.raises(ValueError, match=message) as error:
        exflow.load_trace(tmp_path / "bad.npy", num_experts=8)
    assert "bad.npy" in str(error.value)


@given(st.lists(st.integers(1, 20), min_size=2, max_size=12), st.floats(0.1, 0.9), st.integers(0, 5))
def test_split_keeps_sequences_whole(lengths, fraction, seed):
    ids = np.repeat(np.arange(len(lengths)), lengths)
    trace = exflow.Trace(np.stack([ids, ids], axis=1), len(lengths), ids)
    try:
        train, held_out = trace.split(fraction, seed)
    except ValueError as error:
        assert "too few" in str(error)  # one sequence so long that nothing is left
        return
    assert not set(train.sequences) & set(held_out.sequences)
    assert train.tokens + held_out.tokens == trace.tokens
    # The sequence that passes the mark is the last one: without the longest, train is below it.
    assert fraction * trace.tokens <= train.tokens < fraction * trace.tokens + max(lengths)
    np.testing.assert_array_equal(train.experts[:, 0], train.sequences)
    again = trace.split(fraction, seed)[0]
    np.testing.assert_array_equal(train.sequences, again.sequences)


def test_split_needs_sequences():
    with pytest.raises(ValueError, match="no sequence boundaries"):
        exflow.Trace(np.zeros((4, 2), int), 1).split(0.5, 0)


def test_shipped_trace():
    trace = exflow.load_trace(paths.data("gptoss20b_routing.npz"))
    assert (trace.tokens, trace.layers, trace.k, trace.num_experts) == (138431, 24, 4, 32)
    assert len(np.unique(trace.sequences)) == 470


def test_a_model_without_experts_is_refused(tmp_path):
    np.save(tmp_path / "good.npy", np.zeros((4, 2), np.int64))
    with pytest.raises(ValueError, match="num_experts is 0"):
        exflow.load_trace(tmp_path / "good.npy", num_experts=0)
