"""Placement: exact where it says so, balanced always, never worse than the yardsticks, reproducible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow import highs, paper
from repro.exflow.evaluate import distances, total_cost
from repro.exflow.search import portfolio
from repro.exflow.search.problem import Problem

TINY = st.sampled_from([(2, 4, 2), (3, 4, 2), (3, 4, 4), (2, 6, 3), (2, 6, 2)])  # layers, experts, GPUs
SEED = st.integers(0, 10_000)


def hops(placement, counts):
    return total_cost(counts, placement.gpu, distances(placement.gpus, placement.gpus))


@given(TINY, SEED)
@settings(max_examples=60, deadline=None)
def test_affinity_is_optimal_where_it_says_so(fewest_hops, make_counts, shape, seed):
    """One expert per GPU (chain of assignments) and few partitions (Viterbi) against brute force."""
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    placement = exflow.place(counts, gpus)
    assert placement.optimal
    assert hops(placement, counts) == pytest.approx(fewest_hops(counts, gpus))


@given(TINY, SEED)
@settings(max_examples=15, deadline=None)
def test_integer_program_is_optimal_and_bounds_itself(fewest_hops, make_counts, shape, seed):
    layers, experts, gpus = shape
    counts = make_counts(seed, layers, experts)
    solved = paper.solve(counts, gpus, 60.0)
    best = fewest_hops(counts, gpus)
    assert not solved.time_limited
    assert solved.hops == pytest.approx(best, rel=1e-3) and solved.bound <= best * (1 + 1e-6)


@given(SEED)
@settings(max_examples=10, deadline=None)
def test_search_without_the_exact_methods_finds_the_optimum(fewest_hops, make_counts, seed):
    """The rounds of annealing, forced on an instance that brute force can still solve."""
    counts = make_counts(seed, 3, 6)
    problem = Problem(counts, distances(2, 2))
    gpu = portfolio.rounds(problem, portfolio.Budget(20), np.random.default_rng(seed))
    assert total_cost(counts, gpu, distances(2, 2)) == pytest.approx(fewest_hops(counts, 2))


MACHINES = [(1, None), (2, None), (4, None), (8, 4), (8, 2), (16, 4), (6, 3), (12, 4), (24, 8)]


@pytest.mark.parametrize("method", exflow.METHODS)
@pytest.mark.parametrize(("gpus", "per_node"), MACHINES)
def test_balance(make_counts, method, gpus, per_node):
    """Exactly E/gpus experts per GPU and layer (Eq. 9), for every method, also where GPUs are no power of two."""
    experts = 48 if gpus in (6, 12, 24) else 32
    counts = make_counts(gpus, 3, experts)
    placement = exflow.place(counts, gpus, per_node, method, time_limit_s=0.3, rounds=3)
    assert placement.gpu.shape == (3, experts) and placement.gpu.dtype == np.int64
    for row in placement.gpu:
        assert np.bincount(row, minlength=gpus).tolist() == [experts // gpus] * gpus
    assert (placement.node == placement.gpu // placement.gpus_per_node).all()


def test_contiguous_is_rank_order():
    gpu = exflow.place(np.ones((1, 8, 8)), 4, method="contiguous").gpu
    assert gpu.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2


@pytest.mark.parametrize("machine", [(2, None), (4, None), (8, None), (8, 4), (16, 4)])
def test_affinity_beats_the_yardsticks_on_new_tokens(make_trace, machine):
    gpus, per_node = machine
    trace = exflow.Trace(make_trace(6, 32, 8000, alpha=0.1), 32, np.arange(8000) // 100)
    train, held_out = trace.split(0.7, 0)
    counts = exflow.transitions(train)

    def crossing(method):
        return exflow.evaluate(exflow.place(counts, gpus, per_node, method, rounds=20), held_out)

    ours, rank_order, random = (crossing(method) for method in ("affinity", "contiguous", "random"))
    for other in (rank_order, random):
        assert ours.crossing_fraction < 0.8 * other.crossing_fraction
        assert ours.node_crossing_fraction <= 0.8 * other.node_crossing_fraction


def test_stages_put_nodes_first(make_trace):
    """Two nodes: knowing of nodes must not cost hops between them compared with a placement that ignores them."""
    counts = exflow.transitions(exflow.Trace(make_trace(6, 32, 8000, alpha=0.1), 32))
    flat = exflow.place(counts, 8, None, rounds=20)
    staged = exflow.place(counts, 8, 4, rounds=20)
    as_nodes = exflow.Placement(flat.gpu, 8, 4, "affinity")
    assert exflow.evaluate(staged, counts).weighted_hops < exflow.evaluate(as_nodes, counts).weighted_hops


def test_planted_blocks_are_found(make_counts):
    """Experts that only ever exchange tokens within hidden groups: the optimum is no hop at all."""
    rng = np.random.default_rng(0)
    hidden = np.stack([rng.permutation(np.repeat(np.arange(4), 8)) for _ in range(8)])
    together = hidden[:-1, :, None] == hidden[1:, None, :]
    placement = exflow.place(rng.integers(1, 9, together.shape) * together, 4)
    assert hops(placement, together.astype(float)) == 0


def test_a_stage_that_ran_out_of_time_leaves_the_next_its_own():
    budget = portfolio.Budget(5, deadline=0.0)
    assert budget.expired() and budget.cut
    budget.deadline = np.inf
    assert not budget.expired() and budget.cut


@pytest.mark.parametrize("method", ["random", "affinity"])
@pytest.mark.parametrize("per_node", [None, 4])
def test_a_seed_gives_one_placement(make_counts, method, per_node):
    counts = make_counts(1, 6, 32)

    def place(seed):
        return exflow.place(counts, 8, per_node, method, seed=seed, rounds=12).gpu

    np.testing.assert_array_equal(place(3), place(3))
    assert (place(3) != place(4)).any()


def test_more_rounds_are_never_worse(make_counts):
    counts = make_counts(2, 8, 32)
    costs = [hops(exflow.place(counts, 8, rounds=rounds, seed=5), counts) for rounds in (0, 10, 40)]
    assert costs == sorted(costs, reverse=True)


@given(SEED, st.sampled_from([4, 8, 32]), st.integers(0, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_a_search_that_is_cut_is_not_worse_than_rank_order(make_counts, seed, gpus, looks, near):
    """After so many looks at the clock, and without rounds; `near`: where rank order is good, or the best there is."""
    counts = make_counts(seed, 5, 32)
    if near:
        counts *= np.where(distances(8, 8).repeat(4, axis=0).repeat(4, axis=1) > 0, 0.05, 1.0)
    left = iter([9.0] * looks)
    clock = lambda: next(left, 0.0)  # noqa: E731
    rank_order = hops(exflow.place(counts, gpus, method="contiguous"), counts)
    for found in (exflow.place(counts, gpus, rounds=3, clock=clock), exflow.place(counts, gpus, rounds=0)):
        assert hops(found, counts) <= rank_order * (1 + 1e-12)


def test_only_a_gap_of_nothing_is_a_proof(make_counts, monkeypatch):
    """HiGHS says that it is done once 0.01 % are left, which is no optimum."""
    counts, minimise = make_counts(0, 3, 4), highs.minimise

    def place(share):
        def short(*args):
            found, bound, limited = minimise(*args)
            return found, bound * share, limited

        monkeypatch.setattr(highs, "minimise", short)
        return exflow.place(counts, 2, method="exflow-direct")

    proven, near = place(1.0), place(1 - 5e-5)
    assert proven.optimal and "1 solved to optimality" in proven.note
    assert not near.optimal and not near.time_limited and near.mip_gap == pytest.approx(5e-5, rel=1e-3)
    assert near.note.endswith("0 solved to optimality, 1 to the solver's tolerance, with a gap of up to 5.0e-05")


def test_time_limits_are_told(make_counts, monkeypatch):
    counts = make_counts(3, 12, 64)
    cut = exflow.place(counts, 8, rounds=10**6, time_limit_s=0.5)
    assert cut.time_limited and "time limit" in cut.note and not cut.optimal
    assert not exflow.place(counts, 8, rounds=1).time_limited
    monkeypatch.setattr("repro.exflow.placement.TIME_LIMIT_S", 1e-6)  # where neither is given, and of integer programs
    assert not exflow.place(counts, 8, rounds=1).time_limited and exflow.place(counts, 8).time_limited
    program_cut = exflow.place(counts, 4, method="exflow-direct", time_limit_s=0.5)
    assert program_cut.time_limited and program_cut.mip_gap > 0.5 and "gap" in program_cut.note


@pytest.mark.parametrize("per_node", [None, 4])
def test_a_time_limit_alone_is_used_up(make_counts, per_node):
    """However small the instance, unless the result is proven."""
    found = exflow.place(make_counts(3, 4, 16), 8, per_node, time_limit_s=0.4)
    assert found.time_limited and found.seconds > 0.39
    assert not exflow.place(make_counts(3, 4, 8), 4, time_limit_s=60.0).time_limited


@pytest.mark.parametrize(
    ("method", "per_node"), [("affinity", None), ("affinity", 4), ("exflow", 4), ("contiguous", None)]
)
def test_progress_reaches_one_and_never_falls(make_counts, method, per_node):
    seen = []
    exflow.place(
        make_counts(4, 3, 16),
        8,
        per_node,
        method,
        rounds=3,
        time_limit_s=4.0,
        progress=lambda done, _: seen.append(done),
    )
    assert seen == sorted(seen) and seen[-1] == 1.0 and seen[0] >= 0.0
    assert len(set(seen)) > 2 or method == "contiguous"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 5}, "32 experts per layer cannot be shared evenly by 5 GPUs"),
        ({"gpus": 0}, "by 0 GPUs"),
        ({"gpus": 8, "gpus_per_node": 3}, "gpus_per_node is 3: 8 GPUs do not make whole nodes of 3"),
        ({"gpus": 8, "method": "best"}, "'best', allowed: contiguous, random, exflow"),
        ({"gpus": 8, "time_limit_s": 0.0}, "time_limit_s is 0.0"),
        ({"gpus": 8, "time_limit_s": float("inf")}, "time_limit_s is inf, must be positive and finite"),
        ({"gpus": 8, "rounds": -1}, "rounds is -1"),
        ({"gpus": 8, "max_load": 0.9}, "max_load is 0.9, must be at least 1"),
        ({"gpus": 8, "max_load": 1.1, "method": "exflow"}, "max_load is 1.1: only method affinity .* found 'exflow'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        exflow.place(np.ones((2, 32, 32)), **arguments)


@pytest.mark.parametrize(
    "counts",
    [np.ones((4, 4)), np.ones((1, 4, 5)), np.zeros((1, 4, 4)), np.full((1, 4, 4), np.nan), np.ones((1, 4, 4)).tolist()],
)
def test_wrong_counts_are_refused(counts):
    with pytest.raises(ValueError, match="transition counts"):
        exflow.place(counts, 2)
