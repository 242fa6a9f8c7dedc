"""Replicas of experts: the walk against plain Python, and what each way of choosing promises."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import exflow
from repro.exflow.placement import Placement
from repro.exflow.serving import replicas
from repro.exflow.serving.replicas import Replicas, evaluate_replicas, place_replicas
from repro.exflow.serving.slots import physical_to_logical

MACHINES = st.sampled_from([(4, 4), (4, 2), (2, 2), (2, 1), (8, 4), (1, 1)])
SEED = st.integers(0, 9999)
HOP_COSTS = (1.0, 2.0)


@pytest.fixture(scope="module")
def setting(make_trace):
    def draw(seed, gpus, per_node, tokens=60, layers=4):
        rng = np.random.default_rng(seed)
        rows = np.tile(np.repeat(np.arange(gpus), 8 // gpus), (layers, 1))
        placement = Placement(rng.permuted(rows, axis=1), gpus, per_node, "random")
        return placement, exflow.Trace(make_trace(layers, 8, tokens, seed), 8)

    return draw


def walked(placed, trace):
    """(intra hops, inter hops, loads [layers, gpus]) of all tokens, by the rule in the header of the module."""
    intra = inter = 0
    load = np.zeros((trace.layers, placed.gpus))
    for number, token in enumerate(trace.experts.tolist()):
        here = number % placed.gpus
        for layer, expert in enumerate(token):
            slots = [s for s, e in enumerate(placed.physical_to_logical[layer].tolist()) if e == expert]
            hosts = sorted({s // placed.slots_per_gpu for s in slots})
            near = [h for h in hosts if h // placed.gpus_per_node == here // placed.gpus_per_node]
            candidates = [here] if here in hosts else near or hosts
            there = candidates[here % len(candidates)]
            load[layer, there] += 1
            if layer > 0 and there != here:
                if there in near:
                    intra += 1
                else:
                    inter += 1
            here = there
    return intra, inter, load


def test_a_placement_that_is_uneven_is_not_cut_anew(tmp_path):
    """Slots of a server are cut evenly: with 3, 1, 2 and 2 experts a GPU would get others than it was given, and a GPU
    too many at the end none."""
    trace = exflow.Trace(np.tile(np.arange(8)[:, None], (1, 2)), 8)
    uneven = Placement(np.array([[0, 0, 0, 1, 2, 2, 3, 3]] * 2), 4, 4, "by hand")
    empty = Placement(np.tile(np.arange(8) // 4, (2, 1)), 4, 4, "by hand")
    calls = {
        "copies": lambda start: place_replicas(start, trace, 1),
        "dispatch": lambda start: exflow.place_for_dispatch(trace, start),
    } | {name: lambda start, write=write: write(start, tmp_path / "p.json") for name, write in exflow.FORMATS.items()}
    for call in calls.values():
        with pytest.raises(ValueError, match="layer 0 has 3 experts on GPU 0, allowed: 2 on each"):
            call(uneven)
        with pytest.raises(ValueError, match="layer 0 has 4 experts on GPU 0, allowed: 2 on each"):
            call(empty)


def weighted(cost):
    return HOP_COSTS[0] * cost.intra_hops + HOP_COSTS[1] * cost.inter_hops


@given(MACHINES, SEED, st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_evaluator_equals_a_walk_in_python(setting, machine, seed, extra):
    """Also with replicas that nobody would choose."""
    placement, trace = setting(seed, *machine)
    slots = physical_to_logical(placement.gpu).reshape(4, placement.gpus, -1)
    random = np.random.default_rng(seed).integers(8, size=(4, placement.gpus, extra))
    placed = Replicas(np.concatenate([slots, random], axis=2).reshape(4, -1), *machine)
    intra, inter, load = walked(placed, trace)
    cost = evaluate_replicas(placed, trace)
    assert (cost.intra_hops, cost.inter_hops) == pytest.approx((intra / trace.tokens, inter / trace.tokens))
    assert cost.hops_per_token == pytest.approx((intra + inter) / trace.tokens)
    busiest = load.max(axis=1) * placed.gpus / trace.tokens
    assert (cost.max_load, cost.max_load_worst_layer) == pytest.approx((busiest.mean(), busiest.max()))


@given(MACHINES, SEED, st.sampled_from(replicas.OBJECTIVES))
@settings(max_examples=20, deadline=None)
def test_without_replicas_the_placement_is_what_it_was(setting, machine, seed, objective):
    placement, trace = setting(seed, *machine)
    placed = place_replicas(placement, trace, 0, objective)
    assert (placed.physical_to_logical == physical_to_logical(placement.gpu)).all()
    found, before = evaluate_replicas(placed, trace), exflow.evaluate(placement, trace)
    for name in vars(found):
        assert getattr(found, name) == pytest.approx(getattr(before, name)), name


@given(MACHINES, SEED, st.sampled_from(replicas.OBJECTIVES))
@settings(max_examples=30, deadline=None)
def test_slots_are_filled_and_kept(setting, machine, seed, objective):
    """Every GPU has its experts of the placement and `extra` slots more; the map gives back which GPU holds what."""
    placement, trace = setting(seed, *machine)
    for extra in range(min(3, 8 - 8 // placement.gpus) + 1):
        placed = place_replicas(placement, trace, extra, objective)
        assert placed.physical_to_logical.shape == (4, 8 + placement.gpus * extra)
        assert placed.slots_per_gpu == 8 // placement.gpus + extra
        hosted = placed.hosted
        assert np.take_along_axis(hosted, placement.gpu[:, :, None], axis=2).all()
        for layer, row in enumerate(placed.physical_to_logical.reshape(4, placement.gpus, -1)):
            for gpu, experts in enumerate(row):
                assert set(experts.tolist()) == set(np.flatnonzero(hosted[layer, :, gpu]).tolist())


@given(MACHINES, SEED)
@settings(max_examples=30, deadline=None)
def test_more_slots_never_cost_more_hops(setting, machine, seed):
    """On the tokens placed by; and each one keeps the replicas of the one with fewer slots."""
    placement, trace = setting(seed, *machine)
    cost, before = np.inf, None
    for extra in range(8 - 8 // placement.gpus + 1):
        placed = place_replicas(placement, trace, extra, "hops", HOP_COSTS)
        now = weighted(evaluate_replicas(placed, trace))
        assert now <= cost + 1e-9
        assert before is None or (placed.hosted >= before).all()
        cost, before = now, placed.hosted


@given(MACHINES, SEED, st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_replicas_for_load_never_load_a_layer_more(setting, machine, seed, extra):
    placement, trace = setting(seed, *machine)
    if extra > 8 - 8 // placement.gpus:
        return
    before = evaluate_replicas(place_replicas(placement, trace, 0), trace)
    after = evaluate_replicas(place_replicas(placement, trace, extra, "load"), trace)
    assert after.max_load <= before.max_load + 1e-9
    assert after.max_load_worst_layer <= before.max_load_worst_layer + 1e-9


def test_a_hot_expert_is_shared():
    """Half of all tokens want expert 0: with one slot more, the other GPU takes its share of them."""
    rng = np.random.default_rng(0)
    trace = exflow.Trace(np.where(rng.random((4000, 3)) < 0.5, 0, rng.integers(1, 8, (4000, 3))), 8)
    placement = exflow.place(exflow.transitions(trace), 2, method="contiguous")
    before, after = (evaluate_replicas(place_replicas(placement, trace, n, "load"), trace) for n in (0, 1))
    assert before.max_load > 1.35 and after.max_load < 1.1


def test_each_objective_is_better_at_its_own(make_trace):
    trace = exflow.Trace(make_trace(6, 16, 3000, alpha=0.2), 16)
    placement = exflow.place(exflow.transitions(trace), 4, 2, method="contiguous")
    hops, load = (evaluate_replicas(place_replicas(placement, trace, 2, name), trace) for name in replicas.OBJECTIVES)
    none = evaluate_replicas(place_replicas(placement, trace, 0), trace)
    assert weighted(hops) < 0.85 * weighted(none) and weighted(hops) < weighted(load)
    assert load.max_load < none.max_load and load.max_load < hops.max_load


def test_replicas_for_both_join(make_trace):
    """Replicas for load beside replicas for hops: they keep those, and lie between the two objectives."""
    trace = exflow.Trace(make_trace(6, 16, 3000, alpha=0.2), 16)
    placement = exflow.place(exflow.transitions(trace), 4, method="contiguous")
    hops = place_replicas(placement, trace, 1)
    both = place_replicas(hops, trace, 2, "load")
    assert both.slots_per_gpu == 4 + 1 + 2 and (both.hosted >= hops.hosted).all()
    cost, joint = evaluate_replicas(hops, trace), evaluate_replicas(both, trace)
    only_load = evaluate_replicas(place_replicas(placement, trace, 3, "load"), trace)
    assert joint.max_load < cost.max_load and joint.hops_per_token < only_load.hops_per_token


def test_nobody_hops_where_every_gpu_holds_all(setting):
    _, trace = setting(0, 4, 2)
    everywhere = np.tile(np.arange(8), (4, 4))
    assert evaluate_replicas(Replicas(everywhere, 4, 2), trace).hops_per_token == 0.0


def test_wrong_arguments_are_refused(setting):
    placement, trace = setting(0, 4, 2)
    with pytest.raises(ValueError, match="7 extra slots per GPU, allowed: 0 to 6"):
        place_replicas(placement, trace, 7)
    with pytest.raises(ValueError, match="unknown objective 'speed', allowed: hops, load"):
        place_replicas(placement, trace, 1, "speed")
    with pytest.raises(ValueError, match=r"costs are \(2, 1\)"):
        place_replicas(placement, trace, 1, costs=(2, 1))
    with pytest.raises(ValueError, match="top-2 routing, replicas are for top-1"):
        place_replicas(placement, exflow.Trace(np.zeros((5, 4, 2), int), 8), 1)
    with pytest.raises(ValueError, match="4 layers of 8 experts, the routing has 3 of 8"):
        place_replicas(placement, exflow.Trace(trace.experts[:, :3], 8), 1)
    with pytest.raises(ValueError, match="9 slots per layer cannot be shared evenly by 2"):
        Replicas(np.arange(9)[None], 2, 2)
    with pytest.raises(ValueError, match=r"layer 1: experts \[2\] are in no slot"):
        Replicas(np.array([[0, 1, 2, 3], [0, 1, 1, 3]]), 2, 2)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_maps_with_replicas_are_written_for_servers(setting, tmp_path, name):
    placement, trace = setting(0, 4, 2)
    placed = place_replicas(placement, trace, extra=1)
    exflow.FORMATS[name](placed, tmp_path / "map.json")
    content = json.loads((tmp_path / "map.json").read_text())
    rows = content["physical_to_logical_map"] if name == "sglang" else content
    np.testing.assert_array_equal(rows, placed.physical_to_logical)
    back = Replicas(np.array(rows), 4, 2)
    np.testing.assert_array_equal(back.hosted, placed.hosted)
    with pytest.raises(ValueError, match="shares of their own, which no file holds"):
        dealt = np.zeros((*placed.hosted.shape[:2], 4, 4))
        exflow.FORMATS[name](replace(placed, share=dealt), tmp_path / "map.json")


@pytest.mark.parametrize("name", ["csv", "vllm-ascend"])
def test_copies_are_not_lost_on_the_way_to_a_file(setting, tmp_path, name):
    placement, trace = setting(0, 4, 2)
    with pytest.raises(ValueError, match="has copies, which this format does not hold; allowed: sglang, vllm"):
        exflow.FORMATS[name](place_replicas(placement, trace, extra=1), tmp_path / "map")
