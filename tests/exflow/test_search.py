"""Parts of the search against their definitions."""

import importlib
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.exflow.evaluate import distances, loads, total_cost
from repro.exflow.paper import contiguous
from repro.exflow.search import balance, chain, portfolio, resplit
from repro.exflow.search.anneal import anneal
from repro.exflow.search.problem import Problem

SEED = st.integers(0, 10_000)
FLAT_OR_NOT = st.sampled_from([(4, 4), (4, 2), (2, 2)])  # GPUs, GPUs per node


def random_placement(rng, layers, experts, gpus):
    return rng.permuted(contiguous(layers, experts, gpus), axis=1)


def random_state(rng):
    return rng.integers(1, 2**63, 1, dtype=np.uint64)


def balanced(placement, gpus):
    return all(len(set(np.bincount(row, minlength=gpus))) == 1 for row in placement)


@pytest.mark.parametrize(("experts", "gpus"), [(4, 2), (6, 2), (6, 3), (8, 4), (9, 3), (4, 4), (4, 1)])
def test_partitions_are_all_different_and_all_there(experts, gpus):
    found = chain.partitions(experts, gpus)
    groups = {frozenset(frozenset(np.flatnonzero(row == g).tolist()) for g in range(gpus)) for row in found}
    assert len(found) == len(groups) == chain.count_partitions(experts, gpus)
    assert all(len(group) == experts // gpus for partition in groups for group in partition)


@given(SEED, st.sampled_from([(8, 2), (6, 3), (10, 5)]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_recombination_is_the_best_mix_of_layers(make_counts, seed, shape, some_forbidden):
    """Against every choice of partitions, among those allowed, with every labelling."""
    experts, gpus = shape
    rng = np.random.default_rng(seed)
    counts = make_counts(seed, 3, experts)
    pool = np.stack([random_placement(rng, 3, experts, gpus) for _ in range(3)])
    flat = distances(gpus, gpus)
    allowed = np.ones((3, 3), bool)
    if some_forbidden:
        allowed[rng.integers(3, size=3), np.arange(3)] = False
    best = math.inf
    for choice in itertools.product(range(3), repeat=3):
        if not allowed[choice, range(3)].all():
            continue
        rows = [pool[k, layer] for layer, k in enumerate(choice)]
        best = min(
            best,
            sum(
                min(
                    total_cost(pairs[None], np.stack([a, np.array(p)[b]]), flat)
                    for p in itertools.permutations(range(gpus))
                )
                for pairs, a, b in zip(counts, rows, rows[1:], strict=False)
            ),
        )
    found = chain.recombine(counts, pool, gpus, allowed if some_forbidden else None)
    assert total_cost(counts, found, flat) == pytest.approx(best)


@given(SEED, FLAT_OR_NOT)
@settings(max_examples=20, deadline=None)
def test_cost_table_is_the_cost_of_each_move(make_counts, seed, machine):
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    problem = Problem(make_counts(seed, 4, 8), distances(gpus, per_node))
    assert problem.flat == (gpus == per_node)
    placement = random_placement(rng, 4, 8, gpus)
    assert problem.cost(placement) == pytest.approx(total_cost(problem.counts, placement, problem.distance))
    table = problem.table(placement)
    layer, expert, gpu = rng.integers(4), rng.integers(8), rng.integers(gpus)
    moved = placement.copy()
    moved[layer, expert] = gpu
    change = problem.cost(moved) - problem.cost(placement)
    assert change == pytest.approx(table[layer, gpu, expert] - table[layer, placement[layer, expert], expert], abs=1e-6)


@given(SEED, FLAT_OR_NOT)
@settings(max_examples=20, deadline=None)
def test_annealing_ends_where_no_swap_helps(make_counts, seed, machine):
    """This also shows that the table it keeps has not drifted from the placement, at any level costs."""
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    problem = Problem(make_counts(seed, 5, 16), distances(gpus, per_node))
    placement = random_placement(rng, 5, 16, gpus)
    anneal(problem, placement, random_state(rng), 0.4, 0.1, sweeps=40)
    assert balanced(placement, gpus)
    cost = problem.cost(placement)
    for layer, (i, j) in itertools.product(range(5), itertools.combinations(range(16), 2)):
        swapped = placement.copy()
        swapped[layer, [i, j]] = swapped[layer, [j, i]]
        assert problem.cost(swapped) >= cost - 1e-4 * problem.scale


def test_annealing_slowly_beats_annealing_fast_beats_none(make_counts):
    problem = Problem(make_counts(0, 10, 32), distances(4, 4))
    means = []
    for sweeps in (1, 30, 1000):
        costs = []
        for seed in range(4):
            rng = np.random.default_rng(seed)
            placement = random_placement(rng, 10, 32, 4)
            anneal(problem, placement, random_state(rng), 0.4, 0.13, sweeps=sweeps)
            costs.append(problem.cost(placement))
        means.append(np.mean(costs))
    assert means[0] > 1.01 * means[1] > 1.01 * means[2]


def test_annealing_by_the_clock_cools_too(make_counts, monkeypatch):
    """As cold at the end as an annealing that counts sweeps: no random move is left to undo. A look takes 1 ms."""
    ticks, module = itertools.count(), importlib.import_module("repro.exflow.search.anneal")
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000))
    rng = np.random.default_rng(0)
    problem = Problem(make_counts(1, 6, 32), distances(4, 4))
    start = random_placement(rng, 6, 32, 4)
    timed, counted = start.copy(), start.copy()
    anneal(problem, timed, random_state(rng), 0.4, 0.13, seconds=0.1)
    anneal(problem, counted, random_state(rng), 0.4, 0.13, sweeps=300)
    assert problem.cost(timed) < 1.03 * problem.cost(counted) < problem.cost(start)


@given(SEED, FLAT_OR_NOT)
@settings(max_examples=20, deadline=None)
def test_annealing_keeps_a_load_limit(make_counts, seed, machine):
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    counts = make_counts(seed, 5, 16)
    weight = loads(counts)
    reached = balance.least_max_load(weight, gpus)
    cap = 1.02 * reached * weight.sum(axis=1) / gpus
    problem = Problem(counts, distances(gpus, per_node), cap, weight)
    start = balance.repaired(problem, random_placement(rng, 5, 16, gpus))
    placement = start.copy()
    assert problem.fits(start).all()
    anneal(problem, placement, random_state(rng), 0.4, 0.1, sweeps=40)
    assert problem.fits(placement).all() and balanced(placement, gpus)


@given(SEED, st.sampled_from([(2, 2, 6), (4, 2, 8), (4, 4, 12), (3, 3, 6)]), st.booleans())
@settings(max_examples=15, deadline=None)
def test_pair_viterbi_is_the_best_resplit(make_counts, seed, shape, limited):
    """Two GPUs' experts in all layers at once, against all splits that fit, with other GPUs and level costs around."""
    gpus, per_node, experts = shape
    rng = np.random.default_rng(seed)
    counts, distance = make_counts(seed, 3, experts), distances(gpus, per_node)
    start = random_placement(rng, 3, experts, gpus)
    weight = loads(counts)
    cap = np.array([np.bincount(row, own, gpus).max() for row, own in zip(start, weight, strict=True)])
    problem = Problem(counts, distance, cap if limited else None, weight)
    a, b = (int(g) for g in rng.permutation(gpus)[:2])
    size = experts // gpus
    best = math.inf
    own = [np.flatnonzero((row == a) | (row == b)) for row in start]
    for choice in itertools.product(itertools.combinations(range(2 * size), size), repeat=3):
        trial = start.copy()
        for layer, picked in enumerate(choice):
            trial[layer, own[layer]] = b
            trial[layer, own[layer][list(picked)]] = a
        if problem.fits(trial).all():
            best = min(best, total_cost(counts, trial, distance))
    placement = start.copy()
    gain = resplit.pair(problem, placement, a, b, random_state(rng))
    after = total_cost(counts, placement, distance)
    assert after == pytest.approx(best)
    assert gain == pytest.approx(total_cost(counts, start, distance) - after, abs=1e-6)


@given(SEED)
@settings(max_examples=20, deadline=None)
def test_pair_viterbi_on_some_of_many_experts_never_loses(make_counts, seed):
    rng = np.random.default_rng(seed)
    counts, distance = make_counts(seed, 5, 24), distances(2, 2)
    placement = random_placement(rng, 5, 24, 2)
    before = total_cost(counts, placement, distance)
    gain = resplit.pair(Problem(counts, distance), placement, 0, 1, random_state(rng))
    assert gain == pytest.approx(before - total_cost(counts, placement, distance), abs=1e-6)
    assert all((np.bincount(row, minlength=2) == 12).all() for row in placement)


@given(SEED)
@settings(max_examples=20, deadline=None)
def test_matching_labels_keeps_partitions_and_never_loses(make_counts, seed):
    rng = np.random.default_rng(seed)
    problem = Problem(make_counts(seed, 5, 12), distances(3, 3))
    placement = random_placement(rng, 5, 12, 3)
    matched = chain.match_labels(problem.counts, placement, 3)
    assert problem.cost(matched) <= problem.cost(placement) + 1e-9
    together = placement[:, :, None] == placement[:, None, :]
    assert ((matched[:, :, None] == matched[:, None, :]) == together).all()


def test_a_large_problem_gets_few_starts():
    small, large = (Problem(np.ones((layers, e, e)), distances(4, 4)) for layers, e in ((4, 8), (57, 256)))
    assert portfolio._annealed(small, 1.0) == portfolio.ANNEALED
    assert portfolio._annealed(large, 5.0) == 1


@given(SEED, FLAT_OR_NOT, st.booleans())
@settings(max_examples=20, deadline=None)
def test_improving_never_loses_and_keeps_what_must_hold(make_counts, seed, machine, limited):
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    counts = make_counts(seed, 4, 16)
    weight = loads(counts)
    cap = 1.1 * balance.least_max_load(weight, gpus) * weight.sum(axis=1) / gpus
    problem = Problem(counts, distances(gpus, per_node), cap if limited else None, weight)
    for start in (portfolio._random(problem, rng), portfolio._greedy(problem, rng)):
        portfolio._disturb(problem, start, rng)
        assert problem.fits(start).all()
        better = portfolio.improve(problem, start.copy(), portfolio.Budget(None), random_state(rng))
        assert problem.cost(better) <= problem.cost(start) + 1e-9
        assert problem.fits(better).all() and balanced(better, gpus)


def test_paths_of_experts_are_found():
    """All tokens of an expert go to one expert of the next layer, each to another: 8 light or heavy paths."""
    rng = np.random.default_rng(0)
    paths = np.stack([rng.permutation(8) for _ in range(12)])
    counts = np.zeros((11, 8, 8))
    for layer in range(11):
        counts[layer, paths[layer], paths[layer + 1]] = 10.0 ** np.arange(8)
    problem = Problem(counts, distances(2, 2))
    assert problem.cost(portfolio.rounds(problem, portfolio.Budget(4), rng)) == 0
