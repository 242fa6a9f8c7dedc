"""Fan-out, counted with sets token by token, and the search that lowers it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow import trace as trace_module
from repro.exflow.placement import Placement
from repro.exflow.serving import fanout

MACHINES = st.sampled_from([(4, 4), (4, 2), (2, 1), (1, 1), (8, 2)])
SEED = st.integers(0, 9999)


def top_k(seed, tokens, layers, experts, k):
    """A trace of distinct experts, some far more popular than others, linked between layers by a token's taste."""
    rng = np.random.default_rng(seed)
    taste = rng.gumbel(0, 2, (4, layers, experts))[rng.integers(4, size=tokens)]
    chosen = np.argsort(taste + rng.gumbel(0, 1, taste.shape), axis=2)[:, :, :k]
    return exflow.Trace(chosen, experts)


def random_placement(seed, layers, experts, gpus, per_node):
    rows = np.tile(np.repeat(np.arange(gpus), experts // gpus), (layers, 1))
    return Placement(np.random.default_rng(seed).permuted(rows, axis=1), gpus, per_node, "random")


def by_sets(placement, trace):
    """(GPUs, nodes, new GPUs, new nodes), with Python sets."""
    experts = trace.experts.reshape(trace.tokens, trace.layers, trace.k).tolist()
    visited, new = [0, 0], [0, 0]
    for token in experts:
        for level, span in enumerate((1, placement.gpus_per_node)):
            units = [{int(placement.gpu[layer, e]) // span for e in chosen} for layer, chosen in enumerate(token)]
            visited[level] += sum(map(len, units))
            new[level] += sum(len(there - here) for here, there in itertools.pairwise(units))
    per_layer, per_edge = trace.tokens * trace.layers, trace.tokens * (trace.layers - 1)
    return [n / per_layer for n in visited] + [n / per_edge for n in new]


@given(MACHINES, SEED, st.integers(1, 4), st.integers(2, 4))
@settings(max_examples=50, deadline=None)
def test_counts_equal_sets(machine, seed, k, layers):
    trace = top_k(seed, 25, layers, 8, k)
    placement = random_placement(seed, layers, 8, *machine)
    found = fanout.fan_out(placement, trace)
    assert [found.gpus, found.nodes, found.new_gpus, found.new_nodes] == pytest.approx(by_sets(placement, trace))


def test_long_traces_are_counted_in_blocks(monkeypatch):
    trace, placement = top_k(0, 50, 3, 8, 2), random_placement(0, 3, 8, 4, 2)
    whole = fanout.fan_out(placement, trace)
    monkeypatch.setattr(trace_module, "BLOCK", 7)
    assert fanout.fan_out(placement, trace) == whole


@given(MACHINES, SEED)
@settings(max_examples=20, deadline=None)
def test_top_1_is_the_crossing_fraction(machine, seed):
    trace = top_k(seed, 40, 4, 8, 1).top(1)
    placement = random_placement(seed, 4, 8, *machine)
    found, cost = fanout.fan_out(placement, trace), exflow.evaluate(placement, trace)
    assert found.new_gpus == pytest.approx(cost.crossing_fraction)
    assert found.new_nodes == pytest.approx(cost.node_crossing_fraction)
    assert found.gpus == found.nodes == 1
    assert found.cost() == pytest.approx(cost.weighted_hops / (trace.layers - 1))


@given(MACHINES, SEED, st.integers(1, 4), st.sampled_from(fanout.OBJECTIVES), st.sampled_from([0.0, 3.0]))
@settings(max_examples=50, deadline=None)
def test_a_sweep_gains_what_it_says(machine, seed, k, objective, temperature):
    """Incremental counts against counting anew; a sweep without noise never loses."""
    trace = top_k(seed, 60, 3, 8, k)
    start = random_placement(seed, 3, 8, *machine)
    search = fanout._Search(trace, start, objective, (1.0, 3.0))
    gpu, rng = start.gpu.copy(), np.random.default_rng(seed)
    for layer in (1, 0, 2, 1):
        gained = search.sweep(gpu, layer, temperature, rng)
        assert temperature > 0 or gained >= 0
        before = fanout.fan_out(start, trace).cost((1.0, 3.0), objective)
        start = Placement(gpu.copy(), *machine, "swept")
        after = fanout.fan_out(start, trace).cost((1.0, 3.0), objective)
        means = trace.tokens * (trace.layers - 1 if objective == "new_gpus" else trace.layers)
        assert gained / means == pytest.approx(before - after)


@given(SEED, st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_tables_are_the_cost_of_moving_one_expert(seed, k):
    rng = np.random.default_rng(seed)
    experts = top_k(seed, 30, 2, 6, k).experts[:, 0].astype(np.int16)
    gpu, visits = rng.permutation([0, 0, 1, 1, 2, 2]), fanout._visits(experts, 6)
    visit = rng.integers(-1, 2, (1, 30, 3)).astype(np.int8)

    def cost(placement):
        return sum(visit[0, token, list(set(placement[chosen].tolist()))].sum() for token, chosen in enumerate(experts))

    *_, join, leave = fanout._tables(visits, visit, gpu[None])
    for e in range(6):
        for target in range(3):
            if target != gpu[e]:
                moved = gpu.copy()
                moved[e] = target
                assert join[0, e, target] + leave[0, e] == cost(moved) - cost(gpu)


@pytest.mark.parametrize("objective", fanout.OBJECTIVES)
@pytest.mark.parametrize("costs", [(1.0, 2.0), (1.0, 1.0), (0.0, 1.0)])
def test_search_lowers_the_cost_and_keeps_the_balance(objective, costs):
    trace = top_k(1, 600, 5, 16, 4)
    start = exflow.place(exflow.transitions(trace), 8, 4, method="contiguous")
    found = fanout.place_for_fanout(trace, start, objective, costs, sweeps=10)
    assert fanout.fan_out(found, trace).cost(costs, objective) < 0.95 * fanout.fan_out(start, trace).cost(
        costs, objective
    )
    for row in found.gpu:
        assert np.bincount(row, minlength=8).tolist() == [2] * 8
    again = fanout.place_for_fanout(trace, start, objective, costs, sweeps=10)
    assert (again.gpu == found.gpu).all()
    assert (start.gpu == np.arange(16) // 2).all()


def test_a_limit_on_load_that_the_search_does_not_know_is_not_promised():
    trace = top_k(1, 600, 5, 16, 4)
    start = exflow.place(exflow.transitions(trace), 8, 4, method="affinity", max_load=1.3, time_limit_s=0.2)
    assert start.max_load == 1.3 and fanout.place_for_fanout(trace, start, sweeps=10).max_load is None


@given(SEED, st.sampled_from([1, 3, None]), st.sampled_from([1e-9, 0.01]))
@settings(max_examples=20, deadline=None)
def test_never_worse_than_its_start(seed, tokens, time_limit_s):
    """However small the sample and short the time."""
    trace = top_k(seed, 80, 3, 8, 3)
    start = random_placement(seed, 3, 8, 4, 2)
    found = fanout.place_for_fanout(trace, start, seed=seed, tokens=tokens, time_limit_s=time_limit_s)
    assert fanout.fan_out(found, trace).cost() <= fanout.fan_out(start, trace).cost() + 1e-12


def test_finds_the_optimum_where_it_is_plain():
    """Tokens of kind 0 and 1 use disjoint halves of the experts: one GPU each is enough, and nobody need ever move."""
    rng = np.random.default_rng(0)
    halves = np.stack([rng.permutation(8) for _ in range(4)]).reshape(4, 2, 4)
    kind = rng.integers(2, size=100)
    trace = exflow.Trace(np.stack([half[kind] for half in halves], axis=1), 8)
    start = random_placement(3, 4, 8, 2, 1)
    assert fanout.fan_out(fanout.place_for_fanout(trace, start), trace).new_gpus == 0.0
    assert fanout.fan_out(fanout.place_for_fanout(trace, start, "gpus"), trace).gpus == 1.0


def test_no_time_limit_is_an_infinite_one():
    trace, start = top_k(0, 50, 3, 8, 2), random_placement(0, 3, 8, 4, 2)
    found = fanout.place_for_fanout(trace, start, sweeps=4, time_limit_s=np.inf)
    assert (found.gpu == fanout.place_for_fanout(trace, start, sweeps=4, time_limit_s=100.0).gpu).all()
    assert not found.time_limited


def test_progress_grows_to_one():
    told = []
    trace = top_k(0, 50, 3, 8, 2)
    fanout.place_for_fanout(trace, random_placement(0, 3, 8, 4, 2), sweeps=4, progress=lambda *each: told.append(each))
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions) and fractions[-1] == pytest.approx(1.0)


def test_wrong_arguments_are_refused():
    trace, start = top_k(0, 20, 3, 8, 2), random_placement(0, 3, 8, 4, 2)
    with pytest.raises(ValueError, match="2 layers of 8 experts, the routing has 3 of 8"):
        fanout.fan_out(random_placement(0, 2, 8, 4, 2), trace)
    with pytest.raises(ValueError, match="unknown objective 'hops', allowed: new_gpus, gpus"):
        fanout.place_for_fanout(trace, start, "hops")
    with pytest.raises(ValueError, match="unknown objective 'hops', allowed: new_gpus, gpus"):
        fanout.fan_out(start, trace).cost(objective="hops")
    with pytest.raises(ValueError, match=r"costs are \(2, 1\)"):
        fanout.place_for_fanout(trace, start, costs=(2, 1))
    with pytest.raises(ValueError, match="sweeps is 0"):
        fanout.place_for_fanout(trace, start, sweeps=0)
    with pytest.raises(ValueError, match="an expert of a layer twice"):
        fanout.place_for_fanout(exflow.Trace(np.zeros((5, 3, 2), int), 8), start)
