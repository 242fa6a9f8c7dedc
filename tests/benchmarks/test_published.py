"""The published solver: its formulas against a walk of every token, its program and its recursion against ours."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_solvers import published, synthetic

from repro import exflow
from repro.exflow.evaluate import distances, total_cost
from repro.exflow.paper import program


def walked(trace, gpu, intra_gpus, nodes):
    """(cost, avg_intra, avg_inter) by following each token from GPU to GPU."""
    cost = intra = inter = 0
    for token in trace.tolist():
        route = [int(gpu[layer][expert]) for layer, expert in enumerate(token)]
        for here, there in itertools.pairwise(route):
            if here == there:
                continue
            if here // intra_gpus == there // intra_gpus:
                cost, intra = cost + 1, intra + 1
            else:
                cost, inter = cost + 2, inter + 1
    n = len(trace)
    return cost / n, intra / n / (intra_gpus - 1), inter / n / (intra_gpus * (nodes - 1)) if nodes > 1 else 0.0


def fewest_hops(counts, gpus):
    """Optimum of three layers by brute force: given the middle one, the first and the last are independent."""
    experts = counts.shape[1]
    rows = np.array(sorted(set(itertools.permutations(np.repeat(np.arange(gpus), experts // gpus).tolist()))))
    apart = (rows[:, None, :, None] != rows[None, :, None, :]).astype(float)  # [first, middle, a, b]
    first, last = (np.tensordot(apart, pairs, axes=2) for pairs in counts)
    return float((first.min(axis=0) + last.min(axis=1)).min())


@settings(deadline=None)
@given(st.integers(0, 999), st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2)]), st.integers(2, 6))
def test_report_equals_a_walk_and_our_evaluation(seed, machine, layers):
    intra_gpus, nodes = machine
    gpus = intra_gpus * nodes
    rng = np.random.default_rng(seed)
    trace = exflow.Trace(rng.integers(0, 8, (40, layers)), 8)
    gpu = np.stack([rng.permutation(np.repeat(np.arange(gpus), 8 // gpus)) for _ in range(layers)])
    found = published.report(trace, gpu, intra_gpus, nodes)
    assert (found.cost, found.avg_intra, found.avg_inter) == pytest.approx(
        walked(trace.experts, gpu, intra_gpus, nodes)
    )
    ours = exflow.evaluate(exflow.Placement(gpu, gpus, intra_gpus, "any"), trace)
    assert found.cost == pytest.approx(ours.weighted_hops)
    assert found.avg_intra * (intra_gpus - 1) == pytest.approx(ours.intra_hops)
    assert found.avg_inter * intra_gpus * (nodes - 1) == pytest.approx(ours.inter_hops)


@pytest.mark.parametrize(("gpus", "expected"), [(4, 23.25), (8, 27.125)])
def test_published_mixtral_costs_are_below_what_uniform_routing_gives_any_placement(gpus, expected):
    """32 layers of 8 experts on one node: the published 17.495 and 22.166 are 24.8 % and 18.3 % less."""
    uniform = np.ones((31, 8, 8))
    for method in ("contiguous", "random"):
        assert exflow.evaluate(exflow.place(uniform, gpus, method=method), uniform).weighted_hops == pytest.approx(
            expected
        )
    assert 1 - {4: 17.495, 8: 22.166}[gpus] / expected == pytest.approx({4: 0.248, 8: 0.183}[gpus], abs=5e-4)


def test_report_says_what_the_published_solver_cannot_do():
    trace = exflow.Trace(np.zeros((3, 2), np.int64), 4)
    with pytest.raises(ValueError, match="divides by intra_gpus - 1"):
        published.report(trace, np.zeros((2, 4), np.int64), 1, 4)
    with pytest.raises(ValueError, match="top-2"):
        published.report(exflow.Trace(np.zeros((3, 2, 2), np.int64), 4), np.zeros((2, 4), np.int64), 2, 1)


@pytest.mark.parametrize(("gpus", "used"), [(1, 1), (2, 2), (3, 2), (4, 4), (6, 4), (7, 4), (8, 8), (12, 8)])
def test_gpus_beyond_a_power_of_two_stay_empty(gpus, used):
    assert published.parts_used(gpus) == used
    counts = exflow.transitions(synthetic.markov(3, 8, 2000, seed=1))
    placed = published.exact_bisection(counts, gpus)
    assert all((np.bincount(row, minlength=gpus) == [8 // used] * used + [0] * (gpus - used)).all() for row in placed)
    if gpus == 6:  # 8 experts on 4 of them: one and a half times the load that 6 could have
        assert exflow.evaluate(exflow.Placement(placed, 6, 6, "any"), counts).max_load >= 1.5


@settings(deadline=None)
@given(st.integers(0, 99), st.sampled_from([(4, 2), (6, 2), (6, 3), (4, 4)]))
def test_per_token_program_has_the_hops_of_every_placement(seed, shape):
    """A placement with its hops is feasible, one hop less is not: the smallest objective is the number of hops."""
    experts, parts = shape
    rng = np.random.default_rng(seed)
    trace = exflow.Trace(rng.integers(0, experts, (7, 3)), experts)
    model = published.per_token_program(trace, parts)
    group = np.stack([rng.permutation(np.repeat(np.arange(parts), experts // parts)) for _ in range(3)])
    visited = group[np.arange(3), trace.experts]
    hop = (visited[:, :-1] != visited[:, 1:]).ravel()

    def feasible(hops):
        row = model.matrix @ np.concatenate([np.eye(parts)[group].ravel(), hops])
        return bool((row >= model.lower - 1e-9).all() and (row <= model.upper + 1e-9).all())

    assert feasible(hop.astype(float))
    for one in np.flatnonzero(hop):
        fewer = hop.astype(float)
        fewer[one] = 0.0
        assert not feasible(fewer)
    assert model.objective @ np.concatenate([np.eye(parts)[group].ravel(), hop]) == hop.sum()


@pytest.mark.parametrize(("experts", "parts"), [(4, 2), (4, 4), (6, 3)])
def test_per_token_and_aggregated_program_have_the_same_optimum(experts, parts):
    trace = synthetic.markov(3, experts, 60, alpha=0.5, seed=2)
    counts = exflow.transitions(trace)
    per_token = published.solve(published.per_token_program(trace, parts), 60.0)
    aggregated = published.solve(program(counts, parts), 60.0)
    assert per_token.optimal and aggregated.optimal
    best = fewest_hops(counts, parts)
    assert per_token.objective == pytest.approx(best) and aggregated.objective == pytest.approx(best)
    assert per_token.bound == pytest.approx(best)


def test_per_token_program_grows_with_the_tokens_and_the_aggregated_one_does_not():
    shapes = []
    for tokens in (500, 1000):
        trace = synthetic.markov(4, 8, tokens, alpha=1.0, seed=1)
        aggregated = program(exflow.transitions(trace), 2).matrix.shape
        shapes.append((published.per_token_program(trace, 2).matrix.shape, aggregated))
    fixed = (2 * 4 + 8 * 4, 2 * 8 * 4)  # balance and single place; x
    for tokens, (per_token, aggregated) in zip((500, 1000), shapes, strict=True):
        assert per_token == (fixed[0] + 4 * 3 * tokens, fixed[1] + 3 * tokens)
        assert aggregated[1] <= fixed[1] + 3 * 64 and aggregated[0] <= fixed[0] + 2 * 3 * 64


def test_solve_stops_at_its_target_and_its_time():
    trace = synthetic.markov(8, 8, 300, alpha=1.0, seed=1)
    model = program(exflow.transitions(trace), 2)
    easy = published.solve(model, 60.0, target=trace.tokens * 7.0)
    assert easy.objective is not None and not easy.optimal and easy.bound <= easy.objective
    nothing = published.solve(model, 1e-3)
    assert not nothing.optimal


def test_optimal_halves_are_not_an_optimal_whole():
    """The Mixtral-shaped instance on 4 GPUs: halving twice, proven optimal each time, stays above the optimum."""
    counts = exflow.transitions(synthetic.markov(32, 8, 50_000, alpha=1.0, seed=1))
    halved = total_cost(counts, published.exact_bisection(counts, 4), distances(4, 4)) / counts.sum()
    assert halved == pytest.approx(0.5714, abs=5e-5)
    assert exflow.lower_bound(counts, 4) == pytest.approx(0.5635, abs=5e-5)  # exact: Viterbi over all placements


def test_two_gpus_need_no_recursion_so_halving_is_optimal():
    counts = exflow.transitions(synthetic.markov(3, 6, 500, alpha=0.3, seed=4))
    assert total_cost(counts, published.exact_bisection(counts, 2), distances(2, 2)) == fewest_hops(counts, 2)


def test_bisection_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="6 experts per layer cannot be halved into 4"):
        published.exact_bisection(np.ones((2, 6, 6)), 4)
    with pytest.raises(ValueError, match="too many halves"):
        published.exact_bisection(np.ones((2, 32, 32)), 4)
    with pytest.raises(ValueError, match="at least 1"):
        published.parts_used(0)
