"""The bound at a load: never above what brute force finds, whatever the multipliers, and of use at the end."""

import csv
import itertools
import sys

import numpy as np
import placement_load_bound as benchmark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SEED = st.integers(0, 10_000)
SHAPES = st.sampled_from([(6, 3), (6, 2), (4, 2)])  # experts, GPUs; of three layers


def instance_of(seed, experts, gpus):
    """Counts of a chain of three layers whose experts are unevenly hot."""
    rng = np.random.default_rng(seed)
    first = rng.multinomial(300, rng.dirichlet(np.full(experts, 0.7)))
    counts = np.zeros((2, experts, experts))
    for layer in range(2):
        for expert, tokens in enumerate(first):
            counts[layer, expert] = rng.multinomial(tokens, rng.dirichlet(np.full(experts, 0.5)))
        first = counts[layer].sum(axis=0).astype(int)
    return benchmark.Instance(counts, gpus)


def everything(instance):
    """(kept [n], busiest GPU's load over the even share [n, 3]) of every placement."""
    experts, gpus = instance.share.shape[1], instance.gpus
    rows = np.array(sorted(set(itertools.permutations([gpu for gpu in range(gpus) for _ in range(experts // gpus)]))))
    on = (rows[:, :, None] == np.arange(gpus)).astype(float)  # [rows, E, G]
    kept = [np.einsum("aig,ij,bjg->ab", on, counts, on) for counts in instance.counts]
    load = np.einsum("le,aeg->lag", instance.share, on).max(axis=2)
    both = kept[0][:, :, None] + kept[1][None]
    each = np.broadcast_arrays(load[0][:, None, None], load[1][None, :, None], load[2][None, None])
    return both.ravel(), np.stack([one.ravel() for one in each], axis=1)


@given(SEED, SHAPES, st.floats(0, 1), st.floats(0, 1), st.booleans())
@settings(max_examples=25, deadline=None)
def test_no_placement_keeps_more(seed, shape, looser, looser_worst, tuned):
    instance = instance_of(seed, *shape)
    kept, load = everything(instance)
    mean = load.mean(axis=1).min() * (1 + 0.3 * looser)
    worst = load.max(axis=1)[load.mean(axis=1) <= mean].min() * (1 + 0.3 * looser_worst)
    fits = (load.mean(axis=1) <= mean) & (load.max(axis=1) <= worst)
    pairs = instance.relaxation.pairs
    if tuned:
        limits = instance.least + (mean - instance.least.mean())
        chosen, _ = benchmark.multipliers(instance, np.maximum(limits, load[fits][0]), 100)
    else:
        rng = np.random.default_rng(seed)
        matrices = rng.normal(0, 1, (2, 2 * shape[0], 2 * shape[0]))
        chosen = benchmark.Multipliers(matrices + matrices.transpose(0, 2, 1), np.zeros(pairs.unknowns), 0.0)
    most, limits = benchmark.most_kept(instance, chosen, mean, worst)
    assert most * instance.counts.max() >= kept[fits].max() - 1e-9
    assert limits.max() <= worst and (limits >= instance.least - 1e-12).all()


def test_no_load_is_below_the_least():
    with pytest.raises(ValueError, match="less than the least"):
        instance = instance_of(0, 6, 3)
        nothing = benchmark.Multipliers(np.zeros((2, 12, 12)), np.zeros(instance.relaxation.pairs.unknowns), 0.0)
        benchmark.most_kept(instance, nothing, 0.99, 3.0)


@given(SEED, SHAPES)
@settings(max_examples=20, deadline=None)
def test_rows_of_sets_hold_where_the_limits_do(seed, shape):
    instance = instance_of(seed, *shape)
    rng = np.random.default_rng(seed)
    experts, gpus = shape
    gpu = rng.permuted(np.tile(np.arange(experts) % gpus, (3, 1)), axis=1)
    together = (gpu[:, :, None] == gpu[:, None]).astype(float)
    limits = np.array([np.bincount(row, own, gpus).max() for row, own in zip(gpu, instance.share, strict=True)])
    rows, never = benchmark.fitting_rows(instance, limits * (1 + 1e-9))
    y = np.zeros(instance.relaxation.pairs.unknowns)
    for layer in range(3):
        y[instance.relaxation.pairs.within(layer)] = together[layer]
    reached = np.add.reduceat(rows.value * y[rows.index], rows.start[:-1])
    assert (reached <= rows.limit + 1e-6).all() and not y[never].any()


def test_rounds_sharpen_and_are_written(tmp_path, monkeypatch, capsys):
    """Sixteen experts on eight GPUs: sets of two, seconds."""
    out = tmp_path / "rounds.csv"
    options = f"--routing gpt_moe_routing_16e --gpus 8 --rounds 2 --iterations 50 --csv {out}"
    monkeypatch.setattr(sys, "argv", ["placement_load_bound.py", *options.split()])
    benchmark.main()
    rows = list(csv.DictReader(out.open()))
    assert [row["round"] for row in rows] == ["1", "2"]
    assert all(float(row["bound"]) > 0 and 0 < float(row["share"]) <= 1 for row in rows)
    assert "of EPLB's" in capsys.readouterr().out
