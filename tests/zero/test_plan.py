"""Plans: the named ones say what they should, and impossible ones are refused with the reason."""

import itertools
from dataclasses import replace

import pytest

from repro.comm import Route, flat, hierarchical
from repro.topology import Level, Topology, frontier
from repro.zero import plan as plans
from repro.zero.plan import Plan

LEVELS = (None, "package", "node", "cluster")


def _plan(topology, weights, gradients, optimizer, **more) -> Plan:
    ring = flat(topology)
    return Plan("mine", topology, weights, gradients, optimizer, ring, ring, ring, **more)


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("ddp", (1, 1, 1, 1)),
        ("zero1", (1, 1, 384, 1)),
        ("zero2", (1, 384, 384, 1)),
        ("zero3", (384, 384, 384, 1)),
        ("hpz", (384, 384, 384, 8)),
        ("qwz", (384, 384, 384, 1)),
        ("qgz", (384, 384, 384, 1)),
        ("zeropp", (384, 384, 384, 8)),
        ("mics", (8, 8, 8, 1)),
        ("hsdp", (8, 8, 8, 1)),
        ("hfsdp", (8, 8, 384, 1)),
        ("hierarchical", (2, 8, 384, 1)),
        ("hierarchical_fp", (2, 8, 384, 1)),
    ],
)
def test_named_plans_on_frontier(name, degrees):
    plan = plans.named(name, frontier(48))
    found = (plan.weights, plan.gradients, plan.optimizer, plan.secondary)
    assert plan.name == name
    assert tuple(plan.degree(level) for level in found) == degrees


def test_routes_of_the_published_plans(topology):
    zeropp, ours = plans.zeropp(topology), plans.hierarchical(topology)
    assert zeropp.weight_route == flat(topology, 8)  # qwZ
    assert zeropp.gradient_route == Route((("package", "node"), ("cluster",)), (4, 4))  # qgZ
    assert ours.gradient_route.bits == (4, 4, 4) and ours.update_route.bits == ours.weight_route.bits == (8, 8, 8)
    assert all(bits == 32 for bits in plans.unquantised(ours).gradient_route.bits)
    assert plans.unquantised(zeropp).weight_route.hops == zeropp.weight_route.hops


@pytest.mark.parametrize(("weights", "gradients", "optimizer"), list(itertools.product(LEVELS, repeat=3)))
def test_exactly_the_ordered_partitions_are_allowed(topology, weights, gradients, optimizer):
    if LEVELS.index(weights) <= LEVELS.index(gradients) <= LEVELS.index(optimizer):
        _plan(topology, weights, gradients, optimizer)
        return
    with pytest.raises(ValueError, match="need a level at least as wide, because"):
        _plan(topology, weights, gradients, optimizer)


def test_refusals_say_why(topology):
    ring = flat(topology)
    with pytest.raises(ValueError, match=r"optimizer over node, gradients over cluster.*gradient it does not hold"):
        _plan(topology, "node", "cluster", "node")
    with pytest.raises(ValueError, match="'rack' is not in the topology, allowed: package, node, cluster"):
        _plan(topology, "rack", "cluster", "cluster")
    with pytest.raises(ValueError, match=r"secondary shards over node, weights over package.*fewer ranks"):
        _plan(topology, "package", "node", "cluster", secondary="node", secondary_route=ring)
    with pytest.raises(ValueError, match="come together"):
        _plan(topology, "cluster", "cluster", "cluster", secondary="node")
    with pytest.raises(ValueError, match="reduce_across is 'never', allowed: step, micro_batch"):
        _plan(topology, "node", "node", "node", reduce_across="never")
    backwards = Route((("cluster",), ("package", "node")), (16, 16))
    with pytest.raises(ValueError, match="do not walk the levels"):
        replace(plans.ddp(topology), gradient_route=backwards)
    with pytest.raises(ValueError, match="needs a node, a level below the outermost"):
        plans.zeropp(Topology((Level("cluster", 8),)))
    with pytest.raises(ValueError, match="unknown plan 'zero4', known: ddp, zero1, zero2, zero3, hpz"):
        plans.named("zero4", topology)


def test_open_choices_of_the_paper_are_arguments(topology):
    plan = plans.hierarchical(
        topology,
        weights="node",
        secondary="package",
        weight_bits=16,
        gradient_bits=(16, 4, 4),
        reduce_across="micro_batch",
    )
    assert plan.has_secondary and plan.secondary_route == plan.weight_route == hierarchical(topology, 16)
    assert plan.reduce_across == "micro_batch" and plan.gradient_route.bits == (16, 4, 4)


def test_a_copy_over_the_same_ranks_is_not_kept():
    assert plans.zeropp(frontier(2)).has_secondary
    assert not plans.zeropp(frontier(1)).has_secondary  # one node: secondary shards would be the weights


def test_levels_between_two_partitions(topology):
    plan = plans.hierarchical(topology)
    assert plan.levels(None, "package") == ("package",)
    assert plan.levels("package", "cluster") == ("node", "cluster")
    assert plan.levels("cluster", "cluster") == plan.levels(None, None) == ()


def test_hfsdp_is_hsdp_with_optimizer_states_over_all(topology):
    hsdp, hfsdp = plans.hsdp(topology), plans.hfsdp(topology)
    assert (hfsdp.weights, hfsdp.gradients, hfsdp.optimizer) == (hsdp.weights, hsdp.gradients, "cluster")
    assert hfsdp.gradient_route == hsdp.gradient_route and set(hfsdp.gradient_route.bits) == {16}
    assert hfsdp.moves.all_reduce_replicas is None and hfsdp.moves.reduce_to_optimizer == hfsdp.moves.gather_updated
    assert hsdp.moves.all_reduce_replicas == hfsdp.moves.reduce_to_optimizer  # two halves of the same all-reduce
    assert hfsdp.sums_travel and not hsdp.sums_travel  # Megatron-FSDP sends them in the last backward as well
    assert plans.hfsdp(topology, "package").degree("package") == 2


def test_sums_travel_where_the_gradients_partition_is_not_the_whole_machine(topology):
    travel = {name for name in plans.NAMED if plans.named(name, topology).sums_travel}
    assert travel == {"ddp", "zero1", "mics", "hfsdp", "hierarchical", "hierarchical_fp"}
    assert not plans.hierarchical(topology, reduce_across="micro_batch").sums_travel
    assert not plans.hierarchical(frontier(1)).sums_travel
