"""Bounds: never above the optimum, and tight where they must be."""

import itertools
import math
from fractions import Fraction

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow, paths
from repro.exflow import bound
from repro.exflow.bound import cuts, lower_bound_within, sdp
from repro.exflow.bound.pairs import Pairs
from repro.exflow.bound.spectra import Even
from repro.exflow.evaluate import loads, total_cost
from repro.exflow.levels import make_levels
from repro.exflow.search import balance, chain

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
    """Shortest augmenting paths against networkx's network simplex."""
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


def looks(number):
    """A clock that says that time is over after so many looks."""
    left = iter([1e9] * number)
    return lambda: next(left, 0.0)


@given(TINY.filter(lambda shape: shape[1] > shape[2]), SEED, st.sampled_from([0, 30, 200, 1000]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_semidefinite_bound_holds_however_early_it_stops(fewest_hops, make_counts, shape, seed, number, limited):
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    limits = within(counts, gpus, 1.3) if limited else None
    kept = counts.sum() - fewest_hops(counts, gpus, limits)
    found = sdp.kept_bound(counts, gpus, looks(number), limits)
    assert found >= kept
    assert (found == np.inf) == (
        number <= 25 * len(counts)
    )  # 25 iterations ask once for each pair of layers, after a first time


def within(counts, gpus, share):
    """Loads and their limits: the least that is possible, or between it and any load at all."""
    tokens = loads(counts)
    least, any_load = np.empty(len(tokens)), tokens.sum(axis=1)
    for layer, own in enumerate(tokens):
        least[layer] = np.bincount(balance.lightest(own, gpus), own, gpus).max()
    return tokens, np.minimum(least * share, any_load) + 1e-9


@given(TINY.filter(lambda shape: shape[1] > shape[2]), SEED)
@settings(max_examples=40, deadline=None)
def test_any_multipliers_bound_what_is_kept(fewest_hops, make_counts, shape, seed):
    """Weak duality: this is what makes the semidefinite bound rigorous whatever ADMM reached."""
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    rng = np.random.default_rng(seed)
    problem, limits = sdp.even(counts, gpus), within(counts, gpus, 1.2)
    pairs = problem.pairs
    multiplier = rng.normal(0, 10, (layers - 1, 2 * experts, 2 * experts))
    multiplier += multiplier.transpose(0, 2, 1)
    triangles = cuts.find_triangles(pairs, rng.random(pairs.unknowns), cuts.no_rows(), gpus == 2)
    rows = triangles, cuts.load_rows(pairs, *limits)
    for own in rows:
        own.price[:] = rng.gamma(0.5, 5.0, len(own.price))
    assert len(triangles.price) > 0
    assert sdp.dual_bound(problem, multiplier, rows, 2.0) >= counts.sum() - fewest_hops(counts, gpus, limits)


def unknowns(pairs, on):
    """y of a placement, on [layers, G, E]: whether a GPU holds an expert."""
    both = np.concatenate([on[:-1], on[1:]], axis=2).astype(float)
    if pairs.bordered:
        both = np.pad(both, ((0, 0), (0, 0), (0, 1)), constant_values=1.0)
    together = both.transpose(0, 2, 1) @ both
    found = pairs.vector(together) / pairs.entries
    assert (pairs.matrices(found) == together).all()
    return found, together


@given(st.sampled_from([(2, 4, 2), (3, 6, 3), (3, 8, 4), (2, 8, 2), (4, 6, 1)]), SEED)
@settings(max_examples=40, deadline=None)
def test_placements_keep_every_row(shape, seed):
    """Rows of triangles and of loads hold at any placement, and are found where something else breaks them."""
    layers, experts, gpus = shape
    rng = np.random.default_rng(seed)
    pairs, tokens = Pairs(layers - 1, experts), rng.gamma(0.5, 10.0, (layers, experts))
    gpu = rng.permuted(np.tile(np.arange(experts) % gpus, (layers, 1)), axis=1)
    y, together = unknowns(pairs, gpu[:, None, :] == np.arange(gpus)[:, None])
    assert (y[pairs.between] == (gpu[:-1, :, None] == gpu[1:, None, :])).all() and (y[pairs.own] == 1).all()
    for matrix in together:
        assert Even(experts, gpus).nearest(matrix) == pytest.approx(matrix)
    most = np.array([np.bincount(row, own, gpus).max() for row, own in zip(gpu, tokens, strict=True)])
    for rows in (
        cuts.find_triangles(pairs, rng.random(pairs.unknowns), cuts.no_rows(), gpus == 2),
        cuts.load_rows(pairs, tokens, most),
    ):
        reached = np.add.reduceat(rows.value * y[rows.index], rows.start[:-1])
        assert len(reached) > 0 and (reached <= rows.limit + 1e-9).all()
    assert len(cuts.find_triangles(pairs, y, cuts.no_rows(), gpus == 2).price) == 0


@given(st.sampled_from([(2, 4, 2, 3), (3, 6, 3, 4), (2, 4, 3, 2)]), SEED)
@settings(max_examples=40, deadline=None)
def test_placements_with_copies_keep_every_row(shape, seed):
    layers, experts, gpus, held = shape
    rng = np.random.default_rng(seed)
    counts = rng.random((layers - 1, experts, experts))
    problem = sdp.copied(counts, gpus, held)
    pairs = problem.pairs
    on = rng.permuted(np.broadcast_to(np.arange(experts) < held, (layers, gpus, experts)), axis=2)
    y, together = unknowns(pairs, on)
    stays = (on[:-1, :, :, None] & on[1:, :, None, :]).any(axis=1)
    assert (np.minimum(y[pairs.between], 1) == stays).all() and (y[pairs.own] == on.sum(axis=1)).all()
    for matrix in together:
        assert problem.spectrum.nearest(matrix) == pytest.approx(matrix)
    rows = cuts.find_triangles(pairs, rng.random(pairs.unknowns) * gpus, cuts.no_rows(), False)
    reached = np.add.reduceat(rows.value * y[rows.index], rows.start[:-1])
    assert len(reached) > 0 and (reached <= rows.limit).all()
    rows.price[:] = rng.gamma(0.5, 5.0, len(rows.price))
    multiplier = rng.normal(0, 10, together.shape)
    multiplier += multiplier.transpose(0, 2, 1)
    if (on.sum(axis=1) > 0).all():
        assert sdp.dual_bound(problem, multiplier, (rows,), 2.0) >= (counts * stays).sum()


def test_triangles_keep_their_prices_when_looked_for_again():
    rng, pairs = np.random.default_rng(0), Pairs(2, 6)
    first = cuts.find_triangles(pairs, rng.random(pairs.unknowns), cuts.no_rows(), True)
    first.price[:] = np.where(rng.random(len(first.price)) < 0.5, 0.0, rng.random(len(first.price)))
    calm = np.full(pairs.unknowns, 0.5)
    calm[pairs.own] = 1.0
    again = cuts.find_triangles(pairs, calm, first, True)  # none is violated there
    held = first.price > 0
    assert held.any() and not held.all() and len(set(first.name)) == len(first.name)
    assert (again.name == first.name[held]).all() and (again.price == first.price[held]).all()
    assert (again.taken(pairs.unknowns) == first.taken(pairs.unknowns)).all() and again.paid == first.paid


def test_sweeps_end_at_the_nearest_point_of_the_rows():
    rng, pairs = np.random.default_rng(1), Pairs(1, 4)
    start, inverse = rng.random(pairs.unknowns), 1 / pairs.entries
    box = np.zeros(pairs.unknowns), np.zeros(pairs.unknowns), np.ones(pairs.unknowns)
    rows, free = cuts.find_triangles(pairs, start, cuts.no_rows(), False), start.copy()
    for _ in range(1000):
        rows.ascend(free, inverse, box)
    assert free == pytest.approx(start - inverse * rows.taken(pairs.unknowns))
    reached = np.add.reduceat(rows.value * cuts.boxed(free, box)[rows.index], rows.start[:-1])
    assert (reached <= rows.limit + 1e-6).all()
    assert rows.price @ (rows.limit - reached) == pytest.approx(0, abs=1e-6)  # a price only where the row binds


@given(st.floats(-3, 3), st.floats(0, 3), st.sampled_from([(0.0, 1.0), (0.0, 4.0), (1.0, 4.0), (1.0, 1.0)]))
def test_boxed_is_the_best_value(free, bonus, ends):
    every = np.linspace(*ends, 4001)
    best = every[np.argmax(bonus * np.minimum(every, 1) - (every - free) ** 2 / 2)]
    found = cuts.boxed(np.array([free]), tuple(np.array([each]) for each in (bonus, *ends)))
    assert found[0] == pytest.approx(best, abs=1.1e-3)


def test_semidefinite_bound_falls_with_time_and_nearly_proves_the_placement():
    """On gpt-oss-20b's routing; of what is kept, so a bound from above. All are above what a placement keeps."""
    counts = exflow.transitions(exflow.load_trace(paths.data("gptoss20b_routing.npz"), 32, 1))[:8]
    for gpus in (2, 4):
        found = exflow.evaluate(exflow.place(counts, gpus, rounds=5), counts).crossing_fraction
        kept = [sdp.kept_bound(counts, gpus, looks(number * len(counts) + 1)) for number in (25, 50, 100, 200)]
        bounds = [1 - own / counts.sum() for own in kept]
        assert bounds == sorted(bounds)
        assert bounds[-1] <= found <= 1.15 * bounds[-1]


def test_rounding_is_added():
    """Where the relaxation is exact, what was proved is not below the optimum by a last digit either."""
    counts = np.zeros((3, 8, 8))
    for layer, own in enumerate(counts):
        own[:] = np.kron(np.eye(4), np.full((2, 2), 1 / (3 + layer)))
    kept = sdp.kept_bound(counts, 4, looks(3000))
    exact = sum(Fraction(float(tokens)) for tokens in counts.ravel())
    assert exact <= Fraction(kept) <= exact * (1 + Fraction(1, 10**6))


def test_the_optimum_is_proved_to_the_token():
    """A GPT-MoE's routing at 2 GPUs, whose optimum has a gap of nothing left; a bound in fractions of a token is raised."""
    counts = exflow.transitions(exflow.load_trace(paths.data("gpt_moe_routing_16e.npz")))
    found = exflow.evaluate(exflow.place(counts, 2, rounds=30), counts).crossing_fraction
    bound, share = lower_bound_within(counts, 2, math.inf, looks(10_000))
    assert bound == pytest.approx(found, abs=1e-15) and share == 1


@given(st.sampled_from([(3, 4, 2), (2, 6, 3), (2, 6, 2)]), SEED, st.sampled_from([1.0, 1.2, 3.0]))
@settings(max_examples=40, deadline=None)
def test_bounds_of_limited_load_never_exceed_the_optimum(fewest_hops, make_counts, shape, seed, share):
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    tokens, _ = within(counts, gpus, 1.0)
    limit = balance.least_max_load(tokens, gpus).max() * share
    cap = limit * tokens.sum(axis=1) / gpus + 1e-9
    best = fewest_hops(counts, gpus, (tokens, cap)) / counts.sum()
    bound = exflow.lower_bound(counts, gpus, max_load=limit)
    assert bound == pytest.approx(best)  # so few partitions are all tried
    assert exflow.lower_bound(counts, gpus) <= bound + 1e-12


def test_a_limit_on_load_raises_the_bound(make_trace):
    counts = exflow.transitions(exflow.Trace(make_trace(4, 16, 20_000), 16))
    free = exflow.place(counts, 4, rounds=10)
    even = exflow.place(counts, 4, rounds=10, max_load=1.05)
    tokens = loads(counts)
    limits = tokens, 1.05 * tokens.sum(axis=1) / 4
    bound, limited = (
        1 - sdp.kept_bound(counts, 4, looks(400 * len(counts) + 1), each) / counts.sum() for each in (None, limits)
    )
    free, even = (exflow.evaluate(each, counts).crossing_fraction for each in (free, even))
    assert bound + 0.002 < limited <= even and bound <= free


def test_a_limit_that_cannot_be_kept_is_refused():
    counts = np.ones((2, 8, 8))
    counts[0, 0] += 100
    with pytest.raises(ValueError, match="no placement can meet it"):
        exflow.lower_bound(counts, 2, max_load=1.1)


@given(SEED, st.sampled_from([(1.0, 2.0), (1.0, 5.0), (1.0, 1.0)]))
@settings(max_examples=10, deadline=None)
def test_cost_bounds_of_machines_never_exceed_the_optimum(make_counts, seed, costs):
    counts, levels = make_counts(seed, 2, 4), make_levels(4, 2, costs)
    rows = [np.array(row) for row in itertools.permutations(range(4))]
    best = min(total_cost(counts, np.stack(pair), levels.distances()) for pair in itertools.product(rows, rows))
    assert bound.hop_cost_bound(counts, levels) <= best / counts.sum() + 1e-9
    assert bound.hop_cost_bound(counts, make_levels(4, None, [2.0])) == pytest.approx(2 * exflow.lower_bound(counts, 4))


def test_semidefinite_bound_beats_the_others(make_trace):
    counts = exflow.transitions(exflow.Trace(make_trace(5, 16, 20_000, alpha=1.0), 16))
    found = exflow.evaluate(exflow.place(counts, 4, rounds=5), counts).crossing_fraction
    slow = 1 - sdp.kept_bound(counts, 4, looks(1000 * len(counts) + 1)) / counts.sum()
    assert exflow.lower_bound(counts, 4) + 0.02 < slow <= found
    assert exflow.gap(found, slow) < 0.1
    assert exflow.lower_bound(counts, 4) <= exflow.lower_bound(counts, 4, time_limit_s=0.01) <= found


def test_time_after_the_quick_bounds_proves_more(make_trace):
    counts = exflow.transitions(exflow.Trace(make_trace(4, 64, 20_000), 64))
    found, share = lower_bound_within(counts, 8, math.inf, looks(2000))
    assert share == 1 and found > exflow.lower_bound(counts, 8)


def test_semidefinite_bound_is_near_the_exact_optimum(make_trace):
    """A few percent below the optimum, which Viterbi knows here."""
    counts = exflow.transitions(exflow.Trace(make_trace(6, 8, 20_000, alpha=1.0), 8))
    for gpus, lacks in ((4, 0.05), (2, 0.02)):
        optimum = exflow.lower_bound(counts, gpus)
        semidefinite = 1 - sdp.kept_bound(counts, gpus, looks(300 * len(counts) + 1)) / counts.sum()
        assert (1 - lacks) * optimum <= semidefinite <= optimum


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
    assert chain.count_partitions(8, 4) == 105


def test_uneven_gpus_are_refused():
    with pytest.raises(ValueError, match="8 experts per layer cannot be shared evenly by 3"):
        exflow.lower_bound(np.ones((1, 8, 8)), 3)


def test_no_tokens_and_negative_time_are_refused():
    with pytest.raises(ValueError, match="not all zero"):
        exflow.lower_bound(np.zeros((1, 8, 8)), 2)
    with pytest.raises(ValueError, match="time_limit_s is -1"):
        exflow.lower_bound(np.ones((1, 8, 8)), 2, -1)
