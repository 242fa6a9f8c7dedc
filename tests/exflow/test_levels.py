"""Machines of any depth: where a hop travels, what it costs, and that stages and polish respect it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow.levels import make_levels
from repro.topology import Level, Topology, frontier

SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def topology(sizes):
    return Topology(tuple(Level(f"level{i}", size) for i, size in enumerate(sizes)))


RACKS = Topology((Level("node", 2), Level("rack", 2), Level("cluster", 2)))


@given(SIZES)
@settings(deadline=None, max_examples=40)
def test_a_hop_travels_at_the_level_that_joins_its_ranks(sizes):
    machine = topology(sizes)
    levels = make_levels(machine)
    assert levels.gpus == machine.world_size and levels.spans == tuple(machine.span(name) for name in machine.names)
    hop = levels.hop_levels()
    for a, b in np.ndindex(hop.shape):
        name = machine.level_between(a, b)
        assert hop[a, b] == (-1 if name is None else machine.index(name))
        assert levels.distances()[a, b] == hop[a, b] + 1  # default costs 1, 2, 3, ...; no hop is free


@given(SIZES, st.integers(0, 999))
@settings(deadline=None, max_examples=40)
def test_hops_of_each_level_are_those_of_tokens_sent_one_by_one(sizes, seed):
    machine, rng = topology(sizes), np.random.default_rng(seed)
    gpus, costs = machine.world_size, sorted(rng.uniform(0.1, 9.0, len(sizes)))
    trace = rng.integers(0, 2 * gpus, (20, 3))
    gpu = rng.permuted(np.tile(np.repeat(np.arange(gpus), 2), (3, 1)), axis=1)
    hops, paid = dict.fromkeys(machine.names, 0), 0.0
    for token in trace:
        for layer in range(2):
            name = machine.level_between(int(gpu[layer, token[layer]]), int(gpu[layer + 1, token[layer + 1]]))
            if name is not None:
                hops[name] += 1
                paid += costs[machine.index(name)]
    levels = make_levels(machine, costs=costs)
    placement = exflow.Placement(gpu, gpus, levels.spans[0], "random", levels=levels)
    cost = exflow.evaluate(placement, exflow.Trace(trace, 2 * gpus))
    assert cost.level_hops == pytest.approx([hops[name] / 20 for name in machine.names])
    assert cost.hops_per_token == pytest.approx(sum(cost.level_hops))
    assert cost.intra_hops == pytest.approx(cost.level_hops[0])
    assert cost.weighted_hops == pytest.approx(paid / 20)


def test_nodes_are_the_level_of_that_name_wherever_it_is(make_counts):
    """Frontier's innermost unit is a package of two GCDs: hops between packages of a node are inside the node."""
    counts = make_counts(0, 3, 16)
    placement = exflow.place(counts, frontier(2), method="contiguous")
    same = exflow.place(counts, 16, 8, method="contiguous")
    assert placement.gpus_per_node == 8 and (placement.node == same.node).all()
    ours, other = exflow.evaluate(placement, counts), exflow.evaluate(same, counts)
    assert ours.intra_hops == pytest.approx(other.intra_hops) and ours.inter_hops == pytest.approx(other.inter_hops)
    assert ours.level_hops[0] + ours.level_hops[1] == pytest.approx(other.level_hops[0]) and ours.level_hops[0] > 0


@pytest.mark.parametrize("method", exflow.METHODS)
def test_every_method_places_on_three_levels(make_counts, method):
    counts = make_counts(1, 3, 16)
    placement = exflow.place(counts, RACKS, method=method, rounds=3, time_limit_s=2.0)
    assert (placement.gpus, placement.gpus_per_node, placement.levels.names) == (8, 2, RACKS.names)
    for row in placement.gpu:
        assert np.bincount(row, minlength=8).tolist() == [2] * 8


def test_outer_levels_come_first():
    """Experts talk inside hidden racks, more inside hidden nodes, most inside hidden GPUs: all must be found."""
    rng = np.random.default_rng(0)
    hidden = np.stack([rng.permutation(np.repeat(np.arange(8), 4)) for _ in range(6)])
    here, there = hidden[:-1, :, None], hidden[1:, None, :]
    together = [here // span == there // span for span in (1, 2, 4)]
    counts = 90.0 * together[0] + 9.0 * together[1] + 1.0 * together[2]
    found = exflow.evaluate(exflow.place(counts, RACKS, rounds=10), counts).level_hops
    tokens = counts.sum() / 5
    exact = [9.0 * (together[1] & ~together[0]).sum() + (together[1] & ~together[0]).sum()]
    exact.append(1.0 * (together[2] & ~together[1]).sum())
    assert found == pytest.approx([exact[0] / tokens, exact[1] / tokens, 0.0])


def test_costs_steer_the_polish(make_trace):
    """With hops between nodes ten times as dear, fewer of them are made than when all hops cost the same."""
    counts = exflow.transitions(exflow.Trace(make_trace(6, 32, 8000, alpha=0.1), 32))
    dear, even = (exflow.place(counts, 8, 4, rounds=10, costs=costs) for costs in ((1, 10), (1, 1)))
    assert exflow.evaluate(dear, counts).inter_hops < exflow.evaluate(even, counts).inter_hops
    assert exflow.evaluate(dear, counts).hops_per_token > exflow.evaluate(even, counts).hops_per_token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": RACKS, "gpus_per_node": 2}, "gpus_per_node is 2: a topology already has its levels"),
        ({"gpus": 8, "costs": (1, 2)}, r"costs are \(1, 2\), must be one per level, innermost first: node$"),
        ({"gpus": RACKS, "costs": (1, 2)}, "one per level, innermost first: node, rack, cluster"),
        ({"gpus": RACKS, "costs": (1, 3, 2)}, r"costs are \(1, 3, 2\), must be positive and not decreasing"),
        ({"gpus": 8, "gpus_per_node": 4, "costs": (0, 2)}, r"costs are \(0, 2\), must be positive"),
        ({"gpus": 8, "gpus_per_node": 4, "costs": (1, float("nan"))}, "must be positive"),
        ({"gpus": topology([5, 2])}, "32 experts per layer cannot be shared evenly by 10 GPUs"),
    ],
)
def test_wrong_levels_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        exflow.place(np.ones((2, 32, 32)), **arguments)
