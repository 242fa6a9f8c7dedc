"""The search: complete, valid, and the fastest by the predicted time."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import comm
from repro.models.gpt import GPT, GPTConfig
from repro.topology import Level, Topology, frontier
from repro.zero import memory, search, traffic
from repro.zero import plan as plans
from repro.zero.layout import BucketLayout, Layout, layout
from repro.zero.plan_search import partitions, routes

with torch.device("meta"):
    TWENTY_BILLION = layout(GPT(GPTConfig(layers=44, hidden=6144, heads=64, seq_len=2048, vocab=50432)))
SMALL = Layout((BucketLayout(((4096, 16),)), BucketLayout(((4096, 4),))))


def test_partitions_are_all_that_are_valid_and_differ():
    found = [(p.weights, p.secondary, p.gradients, p.optimizer, p.reduce_across) for p in partitions(frontier(2))]
    assert len(found) == len(set(found))
    triples = {(w, g, o) for w, _, g, o, _ in found}
    assert len(triples) == 20  # 3 levels and none: multisets of 3 out of 4
    assert ("package", None, "node", "cluster", "step") in found  # the paper's
    assert ("cluster", "node", "cluster", "cluster", "step") in found  # ZeRO++'s
    assert ("node", None, "node", "node", "micro_batch") in found  # HSDP's
    assert {w for w, *_ in (p for p in found)} == {None, "package", "node", "cluster"}
    assert {p.weights for p in partitions(frontier(1))} == {None, "package", "node"}  # one node: no network


def test_ranking_is_by_time_under_the_limit():
    activations = memory.activations(44, 6144, 2048, 1, 50432, checkpointing=True)
    ranked = search(TWENTY_BILLION, frontier(48), 64e9, activations=activations, gradient_bytes=2)
    assert [c.step_s for c in ranked] == sorted(c.step_s for c in ranked)
    assert all(c.rank_bytes <= 64e9 for c in ranked)
    names = {c.plan.name for c in ranked}
    assert {"package/node/cluster", "cluster/cluster/cluster", "cluster+node/cluster/cluster"} <= names
    assert "-/-/-" not in names  # DDP: 16 bytes for each of 20 billion
    roomier = search(TWENTY_BILLION, frontier(48), gradient_bytes=2)
    assert len(roomier) > len(ranked) and roomier[0].step_s <= ranked[0].step_s


def test_the_sums_of_a_step_count_where_they_are_more_than_a_backward_needs():
    """DDP: 2 bytes of weights, 4 of gradients, 12 of Adam, and in `step` 4 more for each of 3 billion."""
    model = Layout((BucketLayout(((3_000, 1_000),)),) * 1_000 + (BucketLayout(((1_000,),)),))
    (found,) = search(model, frontier(2), plans=[plans.ddp(frontier(2))])
    assert found.rank_bytes == pytest.approx(22 * 3e9, rel=1e-3)
    (found,) = search(model, frontier(2), plans=[plans.hsdp(frontier(2))])  # adds up where the optimizer is
    assert found.rank_bytes == pytest.approx(18 * 3e9 / 8, rel=2e-2)


@settings(max_examples=15, deadline=None)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4)),
    st.tuples(*[st.floats(1e6, 1e9)] * 3),
    st.integers(1, 4),
    st.sampled_from([(16,), (16, 8)]),
)
def test_nothing_named_with_the_same_bits_is_faster(sizes, rates, micro_batches, bits):
    names = ("package", "node", "cluster")
    topology = Topology(tuple(Level(n, s, r) for n, s, r in zip(names, sizes, rates, strict=True)))
    best = search(SMALL, topology, micro_batches=micro_batches, weight_bits=bits, gradient_bits=bits)[0]
    for name in plans.NAMED:
        narrowed = replace(plan := plans.unquantised(plans.named(name, topology), min(bits)), name=plan.name)
        assert best.step_s <= traffic.step_seconds(narrowed, SMALL, micro_batches) * (1 + 1e-9), name


def test_routes_are_every_choice_of_bits():
    found = list(routes(frontier(2), (16, 4)))
    assert len(found) == len(set(found)) == 2**3 + 2 + 2**2


def test_levels_pay_more_where_rates_differ():
    """ZeRO-3's step over that of three levels, on a flat network and on Frontier's."""
    flat = Topology(tuple(Level(v.name, v.size, 1e8) for v in frontier(2, 2, 2).levels))
    gains = []
    for topology in (flat, frontier(2, 2, 2)):
        three = traffic.step_seconds(plans.zero3(topology), SMALL, 4)
        gains.append(three / traffic.step_seconds(plans.hierarchical_fp(topology), SMALL, 4))
    assert 1.2 * gains[0] < 2 < gains[1]


def test_more_micro_batches_prefer_gradients_that_leave_once_a_step():
    given = [plans.zero1(frontier(4, 2, 2)), plans.zero2(frontier(4, 2, 2))]  # ZeRO-2's leave after every micro-batch
    one, many = (
        {found.plan.name: found.step_s for found in search(SMALL, frontier(4, 2, 2), micro_batches=n, plans=given)}
        for n in (1, 16)
    )
    assert one["zero1"] == pytest.approx(one["zero2"]) and many["zero1"] < many["zero2"] / 4


def test_quantising_is_chosen_only_where_it_saves_time():
    slow = partial(traffic.step_seconds, quantize_values_per_s=1e3)
    assert set(search(SMALL, frontier(2), cost=slow)[0].plan.gradient_route.bits) == {16}
    assert 4 in search(SMALL, frontier(2))[0].plan.gradient_route.bits


def test_it_says_what_the_smallest_plan_needs():
    with pytest.raises(ValueError, match=r"no plan fits 1 GB per rank; the smallest, cluster/cluster/cluster, needs"):
        search(TWENTY_BILLION, frontier(48), 1e9)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"micro_batches": 0}, "micro_batches is 0, allowed: an integer of at least 1"),
        ({"weight_bits": ()}, r"weight_bits is \(\), allowed: several of"),
        ({"gradient_bits": 4}, "gradient_bits is 4, allowed: several of"),
        ({"plans": []}, "plans is empty, allowed: at least one"),
        ({"plans": [plans.ddp(frontier(4))]}, "plan 'ddp' is for levels .*'cluster', 4.* has .*'cluster', 2"),
    ],
)
def test_wrong_arguments_are_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        search(SMALL, frontier(2), **wrong)


def test_a_topology_without_rates_orders_no_plans():
    free = Topology((Level("node", 4), Level("cluster", 1, bytes_per_s=1e9)))  # nothing goes over the second
    with pytest.raises(ValueError, match="bytes_per_s is inf and latency_s 0 in all of node, allowed: a rate"):
        search(SMALL, free, 64e9)
    slow = Topology((Level("node", 4, latency_s=1e-6), Level("cluster", 2)))
    assert search(SMALL, slow, 64e9) and search(SMALL, Topology((Level("node", 1),)), 64e9)


def test_every_round_takes_a_latency_and_quantising_and_restoring_their_time():
    top = Topology((Level("node", 4, 1e9, 1e-3), Level("cluster", 2, 1e9, 5e-3)))
    tiny = Layout((BucketLayout(((8,),)),))
    assert traffic.step_seconds(plans.zero3(top), tiny) == pytest.approx(3 * 7 * 5e-3, rel=1e-3)  # rings of 8
    hop = traffic.Hop("gather", ("node", "cluster"), (4, 2), 8, 0, 100, 800)
    assert traffic.hop_seconds(hop, top, 1e3) - traffic.hop_seconds(hop, top) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("kind", "bits", "counted"),
    [
        ("gather", (8, 8, 8), [(100, 0), (0, 0), (0, 800)]),  # a rank gets 8 shards, which travel on as they are
        ("gather", (16, 8, 4), [(100, 200), (200, 400), (0, 0)]),  # 4 bits between nodes, then 8, then 16
        ("reduce", (4, 4, 4), [(400, 400), (200, 200), (100, 100)]),
    ],
)
def test_what_a_rank_gathers_is_restored_as_a_whole(kind, bits, counted):
    topology = frontier(2, 2, 2)
    numel = 100 if kind == "gather" else 800
    collective = traffic.Collective(kind, comm.hierarchical(topology, bits), numel, 2, 1)
    assert [(hop.quantised, hop.restored) for hop in traffic.hops(collective, topology)] == counted


def test_compute_is_added_to_every_plan_and_changes_none():
    bare, busy = (
        search(SMALL, frontier(2)),
        search(SMALL, frontier(2), cost=partial(traffic.step_seconds, compute_s=1.0)),
    )
    assert [c.plan for c in busy] == [c.plan for c in bare]
    assert [c.step_s for c in busy] == pytest.approx([1 + c.step_s for c in bare])


def test_the_plans_that_are_given_are_ranked_as_they_are():
    given = [plans.zero3(frontier(2)), plans.hierarchical(frontier(2))]
    assert [c.plan for c in search(SMALL, frontier(2), plans=given)] == given[::-1]


def test_a_parameter_without_rows_is_named():
    model = torch.nn.Linear(2, 2)
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="model: parameter scale has no dimension: give it one"):
        search(model, frontier(1))


def test_a_model_will_do_in_place_of_its_layout():
    model = GPT(GPTConfig(layers=1, hidden=16, heads=2))
    assert search(model, frontier(1))[0].plan == search(layout(model), frontier(1))[0].plan
