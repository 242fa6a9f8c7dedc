"""The peers of the placement search: valid, seeded, within their time, and as good as they ought to be."""

import importlib.metadata
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import cost_bound
from placement_solvers import annealing, cp_sat, metis, partitioners, synthetic
from placement_solvers.partitioners import PARTITIONERS

from repro import exflow
from repro.exflow.evaluate import distances, total_cost

EXTRA = {"METIS": "cmeel-metis", "METIS-unbalanced": "cmeel-metis", "CP-SAT": "ortools"}


# CP-SAT takes its time, and searches nothing that users run
SLOW = {"CP-SAT": pytest.mark.exhaustive}


@pytest.fixture(params=[pytest.param(name, marks=SLOW.get(name, ())) for name in PARTITIONERS])
def partitioner(request):
    """Each of them, where its package is installed."""
    if request.param in EXTRA:
        try:
            importlib.metadata.version(EXTRA[request.param])
        except importlib.metadata.PackageNotFoundError as error:
            pytest.skip(str(error))
    return PARTITIONERS[request.param]


@pytest.fixture
def clock(monkeypatch):
    """A clock that ticks 1/128 s (exact in binary) at every look: searches become exactly reproducible."""
    ticks = itertools.count()
    for module in (partitioners, annealing):
        monkeypatch.setattr(module, "perf_counter", lambda: next(ticks) / 128)
    return ticks


def cut(counts, placement, gpus):
    """Tokens that change GPU, counted pair by pair."""
    apart = placement[:-1, :, None] != placement[1:, None, :]
    assert placement.dtype == np.int64 and placement.shape == (len(counts) + 1, counts.shape[1])
    assert all((np.bincount(row, minlength=gpus) == counts.shape[1] // gpus).all() for row in placement)
    return float((counts * apart).sum())


def hidden(layers=5, experts=12, gpus=3, seed=0):
    """Counts with a placement in them: experts of the same hidden GPU exchange most tokens."""
    rng = np.random.default_rng(seed)
    group = np.stack([rng.permutation(np.repeat(np.arange(gpus), experts // gpus)) for _ in range(layers)])
    same = group[:-1, :, None] == group[1:, None, :]
    return np.where(same, 100.0, 0.0) + rng.integers(0, 10, same.shape), group


def seconds(partitioner):
    """CP-SAT needs most of a second for a good answer, and may have to share a core."""
    return 4.0 if partitioner is cp_sat.place else 1.0


def test_finds_the_hidden_placement(partitioner):
    counts, group = hidden()
    found = cut(counts, partitioner(counts, 3, 0, seconds(partitioner)), 3)
    if partitioner is not partitioners.load:  # which looks at the load only
        assert found == cut(counts, group, 3)


@pytest.mark.parametrize(("layers", "experts", "gpus"), [(2, 4, 1), (2, 4, 4), (7, 6, 3)])
def test_always_balanced_on_awkward_counts(partitioner, layers, experts, gpus):
    rng = np.random.default_rng(1)
    sparse = np.floor(rng.gamma(0.1, 3.0, (layers - 1, experts, experts)))
    sparse[0, 0, 0] += 1
    top_k = sparse / 9  # as of top-3 routing: no whole numbers
    for counts in (sparse, top_k, 1e9 * sparse):
        cut(counts, partitioner(counts, gpus, 0, 0.1), gpus)


def test_never_worse_than_random_on_affinity(partitioner):
    counts = exflow.transitions(synthetic.markov(6, 8, 5000, alpha=0.5, seed=2))
    blind = [cut(counts, exflow.place(counts, 4, method="random", seed=seed).gpu, 4) for seed in range(5)]
    margin = 0.0 if partitioner is partitioners.load else 0.1
    assert cut(counts, partitioner(counts, 4, 0, seconds(partitioner)), 4) < (1.0 - margin) * np.mean(blind) + margin


@pytest.mark.parametrize("name", ["load", "alternating", "annealing", "METIS", "METIS-unbalanced"])
def test_same_seed_and_clock_same_placement(name, clock):
    if name in EXTRA:
        pytest.importorskip("cmeel")  # what brings METIS
    counts = exflow.transitions(synthetic.markov(8, 16, 3000, alpha=1.0, seed=1))
    runs = [PARTITIONERS[name](counts, 4, seed, 0.125) for seed in (7, 7, 8)]
    assert np.array_equal(runs[0], runs[1])
    assert name == "load" or not np.array_equal(runs[0], runs[2])


@pytest.mark.exhaustive
def test_cp_sat_proves_small_ones_and_answers_within_any_time():
    pytest.importorskip("ortools")
    counts = exflow.transitions(synthetic.markov(3, 6, 2000, alpha=0.5, seed=1))
    best = exflow.lower_bound(counts, 2) * counts.sum()  # exact for so few partitions
    assert cut(counts, cp_sat.place(counts, 2, 0, 30.0), 2) == pytest.approx(best)
    larger = exflow.transitions(synthetic.markov(12, 16, 2000, alpha=0.5, seed=1))
    rank_order = np.tile(np.repeat(np.arange(4), 4), (12, 1))
    assert np.array_equal(cp_sat.place(larger, 4, 0, 1e-3), rank_order)
    assert cut(larger, cp_sat.place(larger, 4, 0, 1.0), 4) <= cut(larger, rank_order, 4)


def test_cp_sat_refuses_what_it_cannot_build():
    pytest.importorskip("ortools")
    with pytest.raises(cp_sat.TooLarge, match=r"2,097,152 clauses, allowed: 2,000,000"):
        cp_sat.place(np.ones((1, 256, 256)), 16, 0, 1.0)


def test_missing_packages_are_import_errors(monkeypatch):
    monkeypatch.setattr(cp_sat.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="ortools"):
        cp_sat.place(np.ones((1, 2, 2)), 2, 0, 1.0)
    monkeypatch.setattr(metis, "PACKAGES", ("no-such-package-of-metis",))
    metis._library.cache_clear()
    with pytest.raises(ImportError):
        partitioners.metis_balanced(np.ones((1, 2, 2)), 2, 0, 1.0)


def test_more_time_is_more_runs_and_never_worse(clock):
    counts = exflow.transitions(synthetic.markov(6, 16, 4000, seed=3))
    seen = []

    def attempt(run, best):
        seen.append((run, best))
        return exflow.place(counts, 4, method="random", seed=run).gpu

    def cut_of_best(runs):
        return min(cut(counts, exflow.place(counts, 4, method="random", seed=run).gpu, 4) for run in runs)

    kept = []
    for limit in (0.0, 0.0625, 0.25):
        seen.clear()
        kept.append(cut(counts, partitioners._repeated(attempt, counts, 4, limit), 4))
        runs = [run for run, _ in seen]
        assert runs == list(range(len(runs))) and seen[0][1] is None
        assert kept[-1] == cut_of_best(runs)
        assert all(cut(counts, best, 4) == cut_of_best(runs[:run]) for run, best in seen[1 : len(runs)])
    assert kept[0] > kept[-1]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 999), st.sampled_from([(2, 2), (4, 2), (6, 3), (8, 4), (4, 4)]), st.integers(2, 5))
def test_settled_is_balanced_idempotent_and_never_worse(seed, shape, layers):
    experts, gpus = shape
    rng = np.random.default_rng(seed)
    counts = np.floor(rng.gamma(0.4, 20.0, (layers - 1, experts, experts)))
    start = np.stack([rng.permutation(np.repeat(np.arange(gpus), experts // gpus)) for _ in range(layers)])
    found = partitioners.settled(counts, start, gpus)
    assert cut(counts, found, gpus) <= cut(counts, start, gpus)
    assert np.array_equal(partitioners.settled(counts, found, gpus), found) or cut(counts, found, gpus) == 0
    cut(counts, partitioners.settled(counts, rng.integers(0, gpus, (layers, experts)), gpus), gpus)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999))
def test_annealing_keeps_its_table_and_its_gain(seed):
    """After thousands of accepted swaps the table and the gain are those of a fresh computation."""
    rng = np.random.default_rng(seed)
    counts = np.floor(rng.gamma(0.4, 20.0, (3, 6, 6)))
    placement = np.stack([rng.permutation(np.repeat(np.arange(3), 2)) for _ in range(4)])
    before, table = cut(counts, placement, 3), annealing._table(counts, placement, 3)
    state = rng.integers(1, 2**63, 1, dtype=np.uint64)
    gain = annealing._swap(counts, counts.transpose(0, 2, 1).copy(), placement, table, 50.0, 2000, state)
    assert cut(counts, placement, 3) == pytest.approx(before - gain)
    assert table == pytest.approx(annealing._table(counts, placement, 3))


def test_load_balances_tokens_and_only_tokens():
    counts = exflow.transitions(synthetic.markov(4, 16, 5000, skew=1.0, seed=0))
    placed = partitioners.load(counts, 4)
    load = [counts[0].sum(axis=1), *counts.sum(axis=1)]
    blind = np.stack([np.outer(here, there) / here.sum() for here, there in itertools.pairwise(load)])  # no affinity
    assert np.array_equal(placed, partitioners.load(blind.round(6), 4))
    rank_order = exflow.place(counts, 4, method="contiguous").gpu
    busiest = [exflow.evaluate(exflow.Placement(each, 4, 4, "any"), counts).max_load for each in (placed, rank_order)]
    assert busiest[0] < 0.8 * busiest[1]


def test_staged_minimises_node_hops_first(clock):
    """Two nodes that exchange nothing, but only with the right halves of the experts on them."""
    inside, _ = hidden(layers=4, experts=8, gpus=2, seed=1)
    counts = np.zeros((3, 16, 16))
    counts[:, ::2, ::2], counts[:, 1::2, 1::2] = inside, inside
    found = partitioners.staged(partitioners.alternating, counts, 4, 2, 0, 1.0)
    assert cut(counts, found // 2, 2) == 0
    assert cut(counts, found, 4) == 2 * cut(inside, hidden(4, 8, 2, 1)[1], 2)


def test_staged_tells_what_does_not_divide():
    with pytest.raises(ValueError, match="4 experts per layer cannot be shared evenly by 3"):
        partitioners.staged(partitioners.load, np.ones((1, 4, 4)), 3, 3, 0, 1.0)
    with pytest.raises(ValueError, match="4 GPUs do not make whole nodes of 3"):
        partitioners.staged(partitioners.load, np.ones((1, 4, 4)), 4, 3, 0, 1.0)


@given(st.sampled_from([(2, 1), (2, 2), (4, 2), (4, 4)]), st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_cost_bound_never_exceeds_the_cheapest_placement(shape, seed):
    """All placements of two layers of 4 experts on nodes and GPUs, by brute force."""
    gpus, nodes = shape
    counts = 1 + np.floor(np.random.default_rng(seed).gamma(0.4, 20.0, (1, 4, 4)))
    rows = sorted(set(itertools.permutations(np.repeat(np.arange(gpus), 4 // gpus).tolist())))
    costs = [
        total_cost(counts, np.array(pair), distances(gpus, gpus // nodes)) for pair in itertools.product(rows, rows)
    ]
    assert cost_bound(counts, gpus, nodes, 0.01) <= min(costs) / counts.sum() + 1e-9
