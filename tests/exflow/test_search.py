"""Parts of the search against their definitions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.exflow import _chain, _kernels, _search
from repro.exflow.evaluate import distances, total_cost

SEED = st.integers(0, 10_000)


def random_placement(rng, layers, experts, gpus):
    return rng.permuted(_chain.contiguous(layers, experts, gpus), axis=1)


@pytest.mark.parametrize(("experts", "gpus"), [(4, 2), (6, 2), (6, 3), (8, 4), (9, 3), (4, 4), (4, 1)])
def test_partitions_are_all_different_and_all_there(experts, gpus):
    found = _chain.partitions(experts, gpus)
    groups = {frozenset(frozenset(np.flatnonzero(row == g).tolist()) for g in range(gpus)) for row in found}
    assert len(found) == len(groups) == _chain.count_partitions(experts, gpus)
    assert all(len(group) == experts // gpus for partition in groups for group in partition)


@given(SEED, st.sampled_from([(8, 2), (6, 3), (10, 5)]))
@settings(max_examples=20, deadline=None)
def test_recombination_is_the_best_mix_of_layers(make_counts, seed, shape):
    """Against every choice of partitions with every labelling."""
    experts, gpus = shape
    rng = np.random.default_rng(seed)
    counts = make_counts(seed, 3, experts)
    pool = np.stack([random_placement(rng, 3, experts, gpus) for _ in range(3)])
    flat = distances(gpus, gpus)
    best = math.inf
    for choice in itertools.product(range(3), repeat=3):
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
    assert total_cost(counts, _chain.recombine(counts, pool, gpus), flat) == pytest.approx(best)


@given(SEED, st.sampled_from([(4, 4), (4, 2), (2, 2)]))
@settings(max_examples=20, deadline=None)
def test_cost_table_is_the_cost_of_each_move(make_counts, seed, machine):
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    counts, distance = make_counts(seed, 4, 8), distances(gpus, per_node)
    placement = random_placement(rng, 4, 8, gpus)
    table = _search.cost_table(counts, placement, distance)
    layer, expert, gpu = rng.integers(4), rng.integers(8), rng.integers(gpus)
    moved = placement.copy()
    moved[layer, expert] = gpu
    change = total_cost(counts, moved, distance) - total_cost(counts, placement, distance)
    assert change == pytest.approx(table[layer, gpu, expert] - table[layer, placement[layer, expert], expert], abs=1e-6)


@given(SEED, st.sampled_from([(4, 4), (4, 2)]))
@settings(max_examples=20, deadline=None)
def test_annealing_books_its_cost(make_counts, seed, machine):
    """The running cost and table must not drift from the placement, else the best one is not the best."""
    gpus, per_node = machine
    rng = np.random.default_rng(seed)
    counts, distance = make_counts(seed, 5, 16), distances(gpus, per_node)
    walk = random_placement(rng, 5, 16, gpus)
    best, costs = walk.copy(), np.full(2, total_cost(counts, walk, distance))
    table = _search.cost_table(counts, walk, distance)
    backward = np.ascontiguousarray(counts.transpose(0, 2, 1))
    run = (0, 2000, 2000, best, costs, _search.random_state(rng))
    _kernels.anneal(counts, backward, walk, table, distance, 50.0, 1.0, *run)
    assert costs[0] == pytest.approx(total_cost(counts, walk, distance))
    assert costs[1] == pytest.approx(total_cost(counts, best, distance))
    np.testing.assert_allclose(table, _search.cost_table(counts, walk, distance), atol=1e-6)
    for placement in (walk, best):
        assert all((np.bincount(row, minlength=gpus) == 16 // gpus).all() for row in placement)


@given(SEED, st.sampled_from([(2, 2, 6), (4, 2, 8), (4, 4, 12), (3, 3, 6)]))
@settings(max_examples=30, deadline=None)
def test_pair_viterbi_is_the_best_resplit(make_counts, seed, shape):
    """Two GPUs' experts in all layers at once, against all splits, with other GPUs and level costs around."""
    gpus, per_node, experts = shape
    rng = np.random.default_rng(seed)
    counts, distance = make_counts(seed, 3, experts), distances(gpus, per_node)
    start = random_placement(rng, 3, experts, gpus)
    a, b = (int(g) for g in rng.permutation(gpus)[:2])
    size = experts // gpus
    best = math.inf
    own = [np.flatnonzero((row == a) | (row == b)) for row in start]
    for choice in itertools.product(itertools.combinations(range(2 * size), size), repeat=3):
        trial = start.copy()
        for layer, picked in enumerate(choice):
            trial[layer, own[layer]] = b
            trial[layer, own[layer][list(picked)]] = a
        best = min(best, total_cost(counts, trial, distance))
    splits = np.array([sum(1 << e for e in s) for s in itertools.combinations(range(2 * size), size)])
    placement = start.copy()
    gain = _kernels.pair_viterbi(counts, placement, distance, a, b, splits, _search.random_state(rng))
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
    splits = np.array([sum(1 << e for e in s) for s in itertools.combinations(range(8), 4)])
    gain = _kernels.pair_viterbi(counts, placement, distance, 0, 1, splits, _search.random_state(rng))
    assert gain == pytest.approx(before - total_cost(counts, placement, distance), abs=1e-6)
    assert all((np.bincount(row, minlength=2) == 12).all() for row in placement)


@given(SEED, st.booleans())
@settings(max_examples=20, deadline=None)
def test_improve_reaches_a_local_optimum(make_counts, seed, flat):
    """Afterwards, no layer can be re-assigned better against its neighbours by any swap."""
    rng = np.random.default_rng(seed)
    counts, distance = make_counts(seed, 4, 8), distances(4, 4 if flat else 2)
    placement = random_placement(rng, 4, 8, 4)
    state = _search.random_state(rng)
    cost = _search.improve(counts, placement, distance, _search.Budget(0), state, flat)
    assert cost == pytest.approx(total_cost(counts, placement, distance))
    for layer, (i, j) in itertools.product(range(4), itertools.combinations(range(8), 2)):
        swapped = placement.copy()
        swapped[layer, [i, j]] = swapped[layer, [j, i]]
        assert total_cost(counts, swapped, distance) >= cost - 1e-6
