"""The bound at a load: never above what brute force finds, at any multipliers, and near it at good ones."""

import csv
import itertools
import sys
from dataclasses import replace

import numpy as np
import placement_load_bound as benchmark
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow, paths
from repro.exflow.evaluate import loads
from repro.exflow.serving.eplb import rebalance_experts

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


@given(SEED, SHAPES, st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=25, deadline=None)
def test_no_placement_keeps_more(seed, shape, looser, looser_worst, noise):
    """At the mean of two good multipliers, also with noise. Without it the bound is near."""
    instance = instance_of(seed, *shape)
    kept, load = everything(instance)
    assert (load.min(axis=0) >= instance.least - 1e-12).all()
    mean = load.mean(axis=1).min() * (1 + 0.3 * looser)
    worst = load.max(axis=1)[load.mean(axis=1) <= mean].min() * (1 + 0.3 * looser_worst)
    fits = (load.mean(axis=1) <= mean) & (load.max(axis=1) <= worst)
    optimum = kept[fits].max()
    best = load[fits][kept[fits].argmax()]
    tight, _ = benchmark.multipliers(instance, best, 100)
    chosen = tight.toward(benchmark.multipliers(instance, best + 0.1, 100)[0], 0.3)
    moved = np.random.default_rng(seed).normal(0, noise, chosen.matrices.shape)
    chosen = replace(chosen, matrices=chosen.matrices + moved + moved.transpose(0, 2, 1))
    most, limits = benchmark.most_kept(instance, chosen, mean, worst)
    assert most * instance.counts.max() >= optimum - 1e-9
    assert limits.max() <= worst and (limits >= instance.least - 1e-12).all()
    if not noise:
        total = instance.counts.sum()
        assert most * instance.counts.max() <= optimum + 0.25 * total


def fitting_partitions(instance, layer, limit):
    """All of them, as [partitions, GPUs] of numbers of sets, by sets that fit in any order."""
    experts, numbers = instance.share.shape[1], np.flatnonzero(instance.fits(layer, limit))
    chosen = itertools.combinations(numbers.tolist(), instance.gpus)
    return [sets for sets in chosen if len(np.unique(instance.sets[list(sets)])) == experts]


@given(SEED, SHAPES)
@settings(max_examples=20, deadline=None)
def test_prices_are_near_the_best_partition(seed, shape):
    instance = instance_of(seed, *shape)
    own = np.random.default_rng(seed).normal(0, 1, (shape[0],) * 2)
    own += own.T
    pairs = list(itertools.combinations(range(instance.sets.shape[1]), 2))
    worth = sum(own[tuple(instance.sets[:, two].T)] for two in pairs)
    limits = instance.least[1] * np.array([1.0, 1.1, 1.3, 2.0, float(shape[1])])
    for limit, most in zip(limits, benchmark.most_of_sets(instance, 1, own, limits), strict=True):
        found = [sum(worth[number] for number in sets) for sets in fitting_partitions(instance, 1, limit)]
        if most is None:
            assert not found
        elif found:
            assert max(found) - 1e-9 <= most <= max(found) + 0.3 * np.abs(worth).sum()
    assert most is not None


@given(SEED, st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_limits_are_the_best_that_fit(seed, layers):
    """Begins in whole parts: exactly those of enumeration."""
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(layers):
        begins = np.concatenate([[0], np.sort(rng.choice(np.arange(1, benchmark.PARTS + 1), 4, replace=False))])
        steps.append(list(zip(begins / benchmark.PARTS, begins + 1.0, np.sort(rng.random(5)), strict=True)))
    most, limits = benchmark.best_limits(steps)
    allowed = [sum(own[0] for own in choice) <= 1 + 1e-9 for choice in itertools.product(*steps)]
    given_up = [sum(own[2] for own in choice) for choice in itertools.product(*steps)]
    assert most == pytest.approx(max(kept for kept, fits in zip(given_up, allowed, strict=True) if fits))
    chosen = [next(own for own in layer if own[1] == limit) for layer, limit in zip(steps, limits, strict=True)]
    assert sum(own[2] for own in chosen) == pytest.approx(most)


def test_limits_may_take_all_there_is():
    layer = [(0.0, 1.0, 0.0), (0.5, 2.0, 1.0)]
    assert benchmark.best_limits([layer, layer])[0] == 2.0
    assert benchmark.best_limits([layer, layer, layer])[0] == 2.0


def test_a_load_that_no_placement_has_is_refused():
    instance = instance_of(0, 6, 3)
    nothing = benchmark.Multipliers(np.zeros((2, 12, 12)), np.zeros(instance.relaxation.pairs.unknowns), 0.0, 0.0)
    for mean, worst in ((0.99, 3.0), (3.0, 0.99)):
        with pytest.raises(ValueError, match="less than the least"):
            benchmark.most_kept(instance, nothing, mean, worst)


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


def test_rounds_prove_more_than_the_bound_without_loads(tmp_path, monkeypatch, capsys):
    """Sixteen experts on eight GPUs: sets of two, seconds."""
    out = tmp_path / "rounds.csv"
    options = f"--routing gpt_moe_routing_16e --gpus 8 --rounds 3 --iterations 200 --csv {out}"
    monkeypatch.setattr(sys, "argv", ["placement_load_bound.py", *options.split()])
    benchmark.main()
    rows = list(csv.DictReader(out.open()))
    assert [row["round"] for row in rows] == ["1", "2", "3"]
    trace = exflow.load_trace(paths.data("gpt_moe_routing_16e.npz")).top(1).split(0.7, seed=0)[0]
    counts = exflow.transitions(trace)
    without = exflow.lower_bound(counts, 8, time_limit_s=1.0) * len(counts)
    eplb = exflow.Replicas(rebalance_experts(loads(counts), 16, 1, 1, 8)[0], 8, 8)
    hops = exflow.evaluate_replicas(eplb, trace, "nearest").hops_per_token
    for row in rows:
        assert without < float(row["bound"]) < hops
        assert float(row["of_eplb"]) == pytest.approx(float(row["bound"]) / hops)
    assert "of EPLB's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--gpus 5", "must share 32 experts evenly"),
        ("--gpus 32", "more than one each"),
        ("--gpus 1", "more than one each"),
        ("--gpus 4", "at most 1000000 ways"),
        ("--iterations 24", "must be 25 or more"),
        ("--routing none", "gptoss20b_routing"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(options, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["placement_load_bound.py", *options.split()])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err
