"""Load limits: kept always, refused with a reason, and what they cost in hops."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow.evaluate import distances, loads, total_cost
from repro.exflow.search import balance
from repro.topology import Level, Topology

SEED = st.integers(0, 10_000)
RACKS = Topology((Level("node", 2), Level("rack", 2), Level("cluster", 2)))


def all_rows(experts, gpus):
    return np.array(sorted(set(itertools.permutations(np.repeat(np.arange(gpus), experts // gpus).tolist()))))


def busiest_loads(rows, weight, gpus):
    """Load of the busiest GPU under each of `rows`, int [n, E]."""
    return np.array([np.bincount(row, weight, gpus).max() for row in rows])


@given(SEED, st.sampled_from([(6, 2), (6, 3), (8, 2)]))
@settings(max_examples=40, deadline=None)
def test_lightest_is_the_most_even_partition(seed, shape):
    """Against all partitions; exact on these sizes."""
    experts, gpus = shape
    weight = np.floor(np.random.default_rng(seed).gamma(0.5, 100.0, experts))
    best = busiest_loads(all_rows(experts, gpus), weight, gpus).min()
    row = balance.lightest(weight, gpus)
    assert np.bincount(row).tolist() == [experts // gpus] * gpus
    assert np.bincount(row, weight, gpus).max() == best


@given(SEED)
@settings(max_examples=20, deadline=None)
def test_lightest_of_many_experts_is_near_the_bound(seed):
    """64 experts on 8 GPUs: the even share, or the hottest expert with the coldest ones, is nearly reached."""
    weight = np.random.default_rng(seed).gamma(0.7, 100.0, 64)
    bound = max(weight.sum() / 8, weight.max() + np.sort(weight)[:7].sum())
    row = balance.lightest(weight, 8)
    assert np.bincount(row).tolist() == [8] * 8
    assert bound * (1 - 1e-9) <= np.bincount(row, weight, 8).max() <= 1.03 * bound


@given(SEED)
@settings(max_examples=20, deadline=None)
def test_evening_never_raises_the_busiest(seed):
    rng = np.random.default_rng(seed)
    weight, row = rng.gamma(0.7, 100.0, 24), rng.permutation(np.repeat(np.arange(4), 6))
    before = np.bincount(row, weight, 4).max()
    after = balance.evened(row, weight, 4)
    assert np.bincount(after, weight, 4).max() <= before and np.bincount(after).tolist() == [6] * 4
    enough = balance.evened(row, weight, 4, cap=before)
    assert (enough == row).all()


@given(SEED, st.sampled_from([1.0, 1.1, 1.5]))
@settings(max_examples=25, deadline=None)
def test_exact_within_a_limit(make_counts, seed, room):
    """Few partitions: the optimum among all placements that keep the limit, by brute force."""
    counts = make_counts(seed, 3, 6)
    weight = loads(counts)
    limit = float(room * balance.least_max_load(weight, 2).max())
    rows = all_rows(6, 2)
    kept = [busiest_loads(rows, own, 2) <= limit * own.sum() / 2 * (1 + 1e-9) for own in weight]
    fewest = min(
        total_cost(counts, np.stack([rows[s] for s in path]), distances(2, 2))
        for path in itertools.product(*[np.flatnonzero(layer) for layer in kept])
    )
    placement = exflow.place(counts, 2, max_load=limit)
    assert placement.optimal and placement.max_load == limit
    assert total_cost(counts, placement.gpu, distances(2, 2)) == pytest.approx(fewest)


@pytest.mark.parametrize("machine", [{"gpus": 8}, {"gpus": 8, "gpus_per_node": 4}, {"gpus": RACKS}, {"gpus": 32}])
@pytest.mark.parametrize("room", [1.0, 1.05, 1.4])
def test_a_limit_is_kept_on_any_machine(make_counts, machine, room):
    """From the tightest on; with E/G experts on every GPU as ever, and fewer hops than no search at all."""
    counts = make_counts(4, 5, 32)
    gpus = RACKS.world_size if machine["gpus"] is RACKS else machine["gpus"]
    limit = float(room * balance.least_max_load(loads(counts), gpus).max())
    placement = exflow.place(counts, **machine, max_load=limit, rounds=4)
    cost = exflow.evaluate(placement, counts)
    assert cost.max_load_worst_layer <= limit * (1 + 1e-8)
    assert all(np.bincount(row, minlength=gpus).tolist() == [32 // gpus] * gpus for row in placement.gpu)
    even = np.stack([balance.lightest(own, gpus) for own in loads(counts)])
    assert cost.hops_per_token < exflow.evaluate(exflow.Placement(even, gpus, gpus, "random"), counts).hops_per_token


def test_a_loose_limit_costs_nothing(make_counts):
    counts = make_counts(5, 5, 32)
    free, loose = (exflow.place(counts, 4, rounds=6, max_load=limit) for limit in (None, 4.0))
    assert exflow.evaluate(loose, counts).hops_per_token == pytest.approx(
        exflow.evaluate(free, counts).hops_per_token, rel=0.01
    )


def test_a_layer_without_tokens_is_no_obstacle():
    counts = np.zeros((3, 8, 8))
    counts[0] = np.random.default_rng(0).gamma(1.0, 1.0, (8, 8))  # layers 2 and 3 are never visited
    placement = exflow.place(counts, 2, max_load=1.5)
    assert exflow.evaluate(placement, counts).max_load_worst_layer <= 1.5


def test_a_limit_that_cannot_be_kept_names_layer_and_expert():
    counts = np.ones((3, 8, 8))
    counts[1, :, 5] += 40
    counts[2, 5, :] += 40  # layer 2, and expert 5 alone gets (8 · 41) of 8 · (41 + 7) tokens: 3.4 shares of 4 GPUs
    with pytest.raises(
        ValueError, match=r"max_load is 1.2: no placement can meet it. In layer 2 expert 5 alone"
    ) as error:
        exflow.place(counts, 4, max_load=1.2)
    assert "3.417 times a GPU's even share, 3.500 with the 1 coldest" in str(error.value)
    assert "lowest limit found for all layers is 3.5000" in str(error.value)


@pytest.mark.parametrize("seed", range(8))
def test_the_lowest_limit_that_is_named_can_be_asked_for(seed):
    counts = np.random.default_rng(seed).gamma(0.3, 100.0, (3, 8, 8))
    with pytest.raises(ValueError, match="lowest limit found") as error:
        exflow.place(counts, 4, max_load=1.0)
    named = float(str(error.value).rsplit(" ", 1)[1])
    assert exflow.evaluate(exflow.place(counts, 4, max_load=named), counts).max_load_worst_layer <= named * (1 + 1e-9)
    assert exflow.place(counts, 4, max_load=3.5).max_load == 3.5


def test_a_limit_that_only_the_partition_forbids_says_so():
    """Loads 3 3 3 1 1 1 on 2 GPUs of 3: no expert is too hot, yet 7 against 5 is the best."""
    weight = np.array([[3.0, 3, 3, 1, 1, 1]] * 2)
    with pytest.raises(ValueError, match=r"max_load is 1.1: no placement that meets it was found. In layer 0 expert 0"):
        balance.check_limit(weight, 2, 1.1)
    balance.check_limit(weight, 2, 7 / 6)


@pytest.mark.parametrize("limit", [float("nan"), float("inf"), 0.5])
def test_a_limit_that_is_none_is_refused_also_where_it_may_be_raised(limit):
    with pytest.raises(ValueError, match=f"max_load is {limit}, must be at least 1"):
        exflow.place(np.ones((2, 16, 16)), 4, rounds=0, max_load=limit, where_possible=True)
