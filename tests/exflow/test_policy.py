"""The policy that a server's expert load balancer asks: what its maps must be, for any size; and vLLM with it."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import repro
from repro import exflow, paths
from repro.exflow.levels import make_levels
from repro.exflow.recording import RoutingCounts
from repro.exflow.serving import eplb
from repro.exflow.serving import policy as policies
from repro.exflow.serving.online import place_for_hops, place_near
from repro.exflow.serving.policy import AffinityPolicy, fixed_policy, keep_slots, policy_for, rebalance_experts
from repro.exflow.serving.slots import logical_to_physical
from repro.launch import launch


@st.composite
def machines(draw):
    """(layers, experts, groups, extra slots per rank, nodes, ranks)."""
    nodes, in_node, experts_per_rank = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = nodes * in_node * experts_per_rank
    extra = draw(st.integers(0, experts - experts_per_rank))
    return draw(st.integers(2, 4)), experts, draw(st.sampled_from([1, nodes])), extra, nodes, nodes * in_node


def routed(layers, experts, k=1, tokens=60, seed=0):
    """A hook's counts of tokens whose next expert depends on the one before."""
    rng, counts = np.random.default_rng(seed), RoutingCounts(layers, experts)
    chosen = rng.permuted(np.tile(np.arange(experts), (tokens, 1)), axis=1)[:, :k] ** 2 // experts
    for layer in range(layers):
        counts.hook(layer)(torch.from_numpy(chosen))
        chosen = np.where(rng.random(chosen.shape) < 0.7, chosen, rng.integers(experts, size=chosen.shape))
    return counts


class Quick(AffinityPolicy):
    rounds = 1


def asked(machine, policy, seed=0):
    layers, experts, groups, extra, nodes, ranks = machine
    weight = torch.from_numpy(np.random.default_rng(seed).integers(0, 100, (layers, experts)))
    return weight, rebalance_experts(weight, experts + extra * ranks, groups, nodes, ranks, policy)


@settings(max_examples=60, deadline=None)
@given(machines(), st.integers(0, 99), st.booleans())
def test_the_three_maps_agree_for_any_size(machine, seed, counted):
    layers, experts, _, extra, _, ranks = machine
    slots = experts + extra * ranks

    class Own(Quick):
        routing = routed(layers, experts, seed=seed) if counted else None

    _, (physical, logical, copies) = asked(machine, Own, seed)
    assert {each.dtype for each in (physical, logical, copies)} == {torch.int64}
    assert physical.shape == (layers, slots) and copies.shape == (layers, experts)
    assert logical.shape == (layers, experts, int(copies.max()))
    assert (copies >= 1).all() and (copies.sum(dim=1) == slots).all()
    for layer in range(layers):
        assert torch.equal(physical[layer].bincount(minlength=experts), copies[layer])
        for expert in range(experts):
            own = logical[layer, expert]
            assert torch.equal(own[: copies[layer, expert]], (physical[layer] == expert).nonzero()[:, 0])
            assert (own[copies[layer, expert] :] == -1).all()


def test_costs_and_rounds_of_a_subclass_are_those_of_its_search(monkeypatch):
    class Dear(AffinityPolicy):
        costs, rounds, routing = (1.0, 50.0), 3, routed(3, 12)

    seen = {}

    def noted(load, counts, slots, levels, groups, rounds, time_limit_s):
        seen.update(costs=levels.costs, rounds=rounds)
        return place_for_hops(load, counts, slots, levels, groups, rounds, time_limit_s)

    monkeypatch.setattr(policies, "place_for_hops", noted)
    asked((3, 12, 1, 1, 2, 4), Dear)
    assert seen == {"costs": (1.0, 50.0), "rounds": 3}


def _found_otherwise_on_each_rank(rank, world):
    """As where a search ends by the clock."""
    policies.place_for_hops = lambda load, *_: np.tile(np.roll(np.arange(load.shape[1]), rank), (len(load), 1))
    return policy_for(routed(3, 8)).rebalance_experts(torch.ones(3, 8), 8, 1, 1, 2)


def test_what_the_first_rank_finds_is_taken_by_all():
    first, second = launch(_found_otherwise_on_each_rank, 2)
    assert torch.equal(first, second)


def busiest(slots, load, ranks):
    """Of each layer, where copies get equal parts."""
    copies = logical_to_physical(slots)[1]
    share = np.take_along_axis(load / copies, slots, axis=1)
    return share.reshape(len(slots), ranks, -1).sum(axis=2).max(axis=1)


def hops(slots, counts, levels):
    """Cost of the hops where every copy takes an equal part of its expert's tokens, wherever they come from."""
    on = np.zeros((len(slots), counts.shape[1], levels.gpus))
    for layer, row in enumerate(slots):
        np.add.at(on[layer], (row, np.arange(len(row)) * levels.gpus // len(row)), 1 / np.bincount(row)[row])
    edges = zip(counts, on[:-1], on[1:], strict=True)
    return sum((pairs * (here @ levels.distances() @ there.T)).sum() for pairs, here, there in edges)


@settings(max_examples=40, deadline=None)
@given(machines(), st.integers(0, 99))
def test_hops_are_fewer_than_under_eplb_and_no_rank_is_busier(machine, seed):
    layers, experts, groups, extra, nodes, ranks = machine
    load, counts = routed(layers, experts, seed=seed).total()
    sizes = experts + extra * ranks, groups, nodes, ranks
    levels = make_levels(ranks, ranks // nodes)
    even, _, _ = eplb.rebalance_experts(load, *sizes)
    found = place_for_hops(load, counts, sizes[0], levels, groups, rounds=1)
    assert (busiest(found, load, ranks) <= busiest(even, load, ranks) * (1 + 1e-8)).all()
    assert hops(found, counts, levels) <= hops(even, counts, levels) * (1 + 1e-9)
    np.testing.assert_array_equal(found, place_for_hops(load, counts, sizes[0], levels, groups, rounds=1))


def way(slots, load, levels):
    """Cost of all tokens' ways from homes that have equally many of them to the nearest copy of their expert."""
    host = np.arange(slots.shape[1]) * levels.gpus // slots.shape[1]
    near = [[levels.distances()[:, host[row == e]].min(axis=1).mean() for e in range(load.shape[1])] for row in slots]
    return (load * near).sum()


@settings(max_examples=40, deadline=None)
@given(machines(), st.integers(0, 99))
def test_copies_lie_apart_for_two_all_to_alls(machine, seed):
    layers, experts, groups, extra, nodes, ranks = machine
    load, _ = routed(layers, experts, seed=seed).total()
    levels = make_levels(ranks, ranks // nodes, (1.0, 4.0))
    even, _, copies = eplb.rebalance_experts(load, experts + extra * ranks, groups, nodes, ranks)
    found = place_near(load, experts + extra * ranks, levels, groups)
    assert way(found, load, levels) <= way(even, load, levels) * (1 + 1e-9)
    assert (busiest(found, load, ranks) <= busiest(even, load, ranks) * (1 + 1e-8)).all()
    np.testing.assert_array_equal(logical_to_physical(found)[1], copies)


def test_two_copies_go_to_two_nodes():
    load, levels = np.tile(np.r_[8.0, 8.0, 4.0, 4.0, 4.0, 4.0], (2, 1)), make_levels(4, 2, (1.0, 4.0))
    for row in place_near(load, 8, levels):
        assert all(len({slot // 4 for slot in np.flatnonzero(row == expert)}) == 2 for expert in (0, 1))


def test_affinity_is_found():
    """Experts that follow each other end up together, where EPLB pairs them by load."""
    load, counts = routed(4, 16, tokens=2000).total()
    levels = make_levels(4)
    even, _, _ = eplb.rebalance_experts(load, 20, 1, 1, 4)
    assert hops(place_for_hops(load, counts, 20, levels), counts, levels) < 0.75 * hops(even, counts, levels)


def test_loads_alone_are_placed_as_eplb_places_them():
    machine = (3, 12, 2, 1, 2, 4)
    weight, (physical, *_) = asked(machine, AffinityPolicy)
    np.testing.assert_array_equal(physical, eplb.rebalance_experts(weight.numpy(), 16, 2, 2, 4)[0])
    empty = policy_for(RoutingCounts(3, 12))
    assert torch.equal(asked(machine, empty)[1][0], physical)


def test_a_placement_that_is_there_is_the_answer():
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(np.r_[np.arange(12), rng.integers(12, size=4)]) for _ in range(3)])
    placed = exflow.Replicas(rows, 4, 2)
    _, (physical, _, copies) = asked((3, 12, 1, 1, 2, 4), fixed_policy(placed))
    np.testing.assert_array_equal(physical, rows)
    assert int(copies.sum()) == rows.size
    before = torch.from_numpy(rows[:, ::-1].copy())
    answer = fixed_policy(placed).rebalance_experts(torch.ones(3, 12), 16, 1, 2, 4, before)
    np.testing.assert_array_equal(answer, keep_slots(rows, before.numpy(), 4))
    with pytest.raises(ValueError, match=r"are \(3, 12, 12, 4\) in the server, \(3, 12, 16, 4\) in the placement"):
        asked((3, 12, 1, 0, 2, 4), fixed_policy(placed))


def test_overlapping_batches_are_placed_by_loads_with_a_warning():
    machine = (3, 12, 2, 1, 2, 4)
    counts = RoutingCounts(3, 12)
    for layer in range(3):  # two batches, layer by layer
        for tokens in (2, 3):
            counts.hook(layer)(torch.zeros(tokens, 1, dtype=torch.int64))
    with pytest.warns(UserWarning, match="10 rows came out of turn"):
        found = asked(machine, policy_for(counts))[1][0]
    assert torch.equal(found, asked(machine, AffinityPolicy)[1][0])
    assert not counts.total()[0].any() and not counts.out_of_turn


def test_counts_are_read_once_and_those_of_another_model_refused():
    machine, counts = (3, 12, 1, 1, 1, 4), routed(3, 12, k=2)
    policy = policy_for(counts)
    _, (with_counts, *_) = asked(machine, policy)
    assert not any(each.any() for each in counts.total())
    assert not torch.equal(with_counts, asked(machine, policy)[1][0])  # the second time by loads alone
    with pytest.raises(ValueError, match=r"load is \(3, 12\), transition counts are \(3, 12, 12\)"):
        asked(machine, policy_for(routed(4, 12)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 5))
def test_experts_that_stay_on_a_rank_keep_their_slot(seed, ranks, per_rank):
    rng = np.random.default_rng(seed)
    old, new = rng.integers(6, size=(2, 2, ranks * per_rank))
    kept = keep_slots(new, old, ranks)
    for before, after, own in zip(*(each.reshape(-1, per_rank) for each in (old, new, kept)), strict=True):
        assert sorted(own) == sorted(after)
        both = sum(min((before == e).sum(), (after == e).sum()) for e in range(6))
        assert (own == before).sum() == both
    assert keep_slots(new, old[:, : per_rank * (ranks - 1)], ranks) is new


VLLM = Path(os.environ.get("REPRO_PEERS", paths.root() / ".peers")) / "bin/python"
PROGRAM = """
import inspect, json, sys, types
import vllm.distributed.eplb.policy as policies
from vllm.distributed.eplb.async_worker import run_rebalance_experts
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
import torch
sys.path += json.loads(sys.argv[1])
from repro.exflow.recording import RoutingCounts
from repro.exflow.serving.policy import AffinityPolicy, policy_for, rebalance_experts

abstract, default = policies.AbstractEplbPolicy, policies.DefaultEplbPolicy
own, theirs = (inspect.signature(each.rebalance_experts) for each in (AffinityPolicy, abstract))
assert list(own.parameters) == list(theirs.parameters), (own, theirs)
assert [p.default for p in own.parameters.values()] == [p.default for p in theirs.parameters.values()]

counts = RoutingCounts(2, 12)
def top(hidden_states, gating_output, topk, renormalize):  # vLLM's own needs a kernel that its CPU build has not
    return gating_output.softmax(dim=-1).topk(topk, dim=-1)

routers = [CustomRoutingRouter(2, 12, top) for _ in range(2)]
for layer, router in enumerate(routers):
    router.set_capture_fn(counts.hook(layer))
torch.manual_seed(0)
logits = torch.randn(500, 12)
for router in routers:
    router.select_experts(torch.randn(500, 8), logits)
load, pairs = counts.total()
assert load.sum() == 2 * 1000 and pairs.sum() == 500

policies.EPLB_POLICIES["default"] = policy_for(counts)
weight = torch.tensor([
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
])
stats = types.SimpleNamespace(global_expert_load_window=weight, num_replicas=16, num_groups=4, num_nodes=2, num_gpus=8)
state, model = types.SimpleNamespace(policy=policies.EPLB_POLICIES["default"]), types.SimpleNamespace(eplb_stats=stats)
old = default.rebalance_experts(weight, 16, 4, 2, 8)
found = run_rebalance_experts(model, state, old, None)

def busiest(slots):
    copies = compute_logical_maps(slots, 12)[1]
    return (weight / copies).gather(1, slots).view(2, 8, -1).sum(2).max(1).values
assert (busiest(found) <= busiest(old) + 1e-3).all()
physical, *maps = rebalance_experts(weight, 16, 4, 2, 8)
assert all(torch.equal(a, b) for a, b in zip(maps, compute_logical_maps(physical, 12)))
assert (busiest(physical) - busiest(old)).abs().max() < 1e-3  # by loads alone: as balanced as vLLM's own
print(json.dumps(found.tolist()))
"""


@pytest.mark.exhaustive
def test_vllm_takes_the_policy_and_its_routers_fill_the_counts():
    if not VLLM.exists():
        pytest.skip(f"{VLLM}: no vLLM (`make peers`)")
    ours = [
        str(Path(repro.__file__).parents[1]),
        str(Path(np.__file__).parents[1]),
    ]  # at the end: vLLM's own come first
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [VLLM, "-c", PROGRAM, json.dumps(ours)], capture_output=True, text=True, env=environment, timeout=400
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = torch.tensor(json.loads(run.stdout.splitlines()[-1]))
    assert found.shape == (2, 16) and all(set(row.tolist()) == set(range(12)) for row in found)
