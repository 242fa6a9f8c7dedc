"""The simulated step: it does what the engine does, all of it and nothing twice, and only what is used decides."""

from collections import defaultdict

import numpy as np
import pytest
from ddp_reference import Setting, batch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import scaling
from repro.experiments.zero_train import ZeroTrain
from repro.launch import launch
from repro.models.gpt import GPTConfig
from repro.scaling import schedule
from repro.scaling.assumptions import Assumptions
from repro.scaling.machines import Machine
from repro.scaling.network import Links, Network, Protocol, network_of
from repro.scaling.step import layout_of
from repro.topology import frontier
from repro.zero import ZeroOptimizer, plan, traffic
from repro.zero.engine import KINDS

POINT = ZeroTrain()
TOPOLOGY = POINT.topology  # 2 x 2 x 2
SHAPES = layout_of(POINT.gpt)
LEVELS = TOPOLOGY.names


def machine(rates=(np.inf, np.inf, np.inf), host=np.inf, quantize=np.inf, latency=0.0):
    links = tuple(Links(count, (Protocol(latency, rate),)) for count, rate in zip((1, 2, 4), rates, strict=True))
    network = Network(TOPOLOGY, links, host_bytes_per_s=host)
    return Machine(network, np.inf, np.inf, 0.0, 0.0, quantize_values_per_s=quantize, native=False)


def seconds(name, on, accumulation=1, passes_s=0.0, update_s=0.0):
    chosen = plan.named(name, TOPOLOGY)
    return schedule.step_seconds(chosen, SHAPES, on, accumulation, passes_s, update_s, Assumptions())


def used(name, on, accumulation=1):
    """Seconds of a step by what is used, and of latencies, counted from the list of its collectives."""
    total = defaultdict(float)
    for each in traffic.collectives(plan.named(name, TOPOLOGY), SHAPES, accumulation):
        for hop in schedule._hops(each, on, Assumptions()):
            total["latency"] += each.times * hop.latency_s
            for what, lasts in hop.uses.items():
                total[what] += each.times * lasts
    return total


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", sorted(plan.NAMED))
def test_processors_that_everything_waits_for_do_all_of_it_once(name, accumulation):
    """Nothing but the processors takes time, so they never rest: a step is as long as all that they do in it."""
    on = machine(host=1e8, quantize=1e8)
    work = used(name, on, accumulation)["processors"]
    assert seconds(name, on, accumulation, 0.5, 0.25) == pytest.approx(work + 0.5 + 0.25) and work > 0.1


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(plan.NAMED)),
    st.integers(1, 3),
    st.tuples(*[st.floats(1e5, 1e9)] * 3),
    st.floats(1e6, 1e10),
    st.floats(0, 1e-2),
)
def test_a_step_is_no_shorter_than_what_it_uses_and_no_longer_than_all_of_it(name, accumulation, rates, host, latency):
    on = machine(rates, host, 1e8, latency)
    each = used(name, on, accumulation)
    each["processors"] += 0.1
    found = seconds(name, on, accumulation, passes_s=0.1)
    longest = max(lasts for what, lasts in each.items() if what != "latency")
    assert longest * (1 - 1e-9) <= found <= sum(each.values()) * (1 + 1e-9)


def test_what_goes_between_nodes_runs_beside_the_next_micro_batch():
    """HSDP sums over the nodes after every micro-batch, on links that gathers and reductions of the next leave free."""
    on = machine((2e6, 5e5, 1.25e5))
    inside, between = (used("hsdp", on)[level] for level in ("node", "cluster"))
    few, many = (seconds("hsdp", on, count) for count in (4, 8))
    assert (many - few) / 4 == pytest.approx(max(inside, between), rel=0.02)
    assert max(inside, between) < 0.7 * (inside + between)


def test_gathers_of_two_hops_do_not_follow_each_other_from_level_to_level():
    """FSDP asks for the next bucket's weights when it has this one's: MiCS waits for both levels in turn."""
    on = machine((2e6, 5e5, np.inf))
    uses = used("mics", on)
    gathers = sum(
        each.times * sum(max(hop.uses.values()) for hop in schedule._hops(each, on, Assumptions()))
        for each in traffic.collectives(plan.mics(TOPOLOGY), SHAPES)
        if each.kind == "gather"
    )
    assert seconds("mics", on) > gathers > max(uses["node"], uses["package"])


# --- the engine's program ---

SHAPE = GPTConfig(layers=3, hidden=12, heads=2, seq_len=8, vocab=33)
SETTING = Setting(shape=SHAPE)
FOUR = frontier(2, 1, 2)


def _started(rank, world, name):
    """What a step of the engine starts, in this order: messages by kind and bucket, and forwards of blocks."""
    model, seen = SETTING.model(), []
    optimizer = ZeroOptimizer(model, plan.named(name, FOUR), accumulation=2, lr=1e-2)
    labelled = optimizer._labelled

    def noted(kind, bucket, steps):
        seen.append((KINDS[kind], bucket.number))
        return labelled(kind, bucket, steps)

    optimizer._labelled = noted
    for number, block in enumerate(model.blocks):  # after FSDP's hook: the block's weights are there
        block.register_forward_pre_hook(lambda *_, number=number: seen.append(("forward", number)))
    for step in range(2):  # the first finds out in which order weights are needed
        seen.clear()
        for number in range(2):
            model(*batch(step, rank, number)).backward()
        optimizer.step()
    return seen


def _simulated(chosen):
    """The same of the simulation."""
    shapes, seen = layout_of(SHAPE), []
    on = Machine(network_of(FOUR), np.inf, np.inf, 0.0, 0.0, quantize_values_per_s=np.inf, native=False)
    sent = {bucket: schedule._messages(chosen, bucket, on, 2, Assumptions()) for bucket in set(shapes.buckets)}
    program = schedule._Program(chosen, shapes, sent, 0.0)
    buckets = {"average": [], "publish": [program.root, *program.blocks]}

    def noting(owner, name, kind):
        does = getattr(owner, name)

        def noted(first, *rest):
            if kind in ("gather", "reduce"):
                seen.append((kind, first))
                buckets["average"] = [first]
            elif kind == "forward" and rest == (1,) and first != program.root:
                seen.append((kind, first))
            elif kind in buckets:
                seen.append((kind, buckets[kind].pop(0)))
            return does(first, *rest)

        setattr(owner, name, noted)

    noting(program, "_gather", "gather")
    noting(program, "_reduce", "reduce")
    noting(program, "_compute", "forward")
    noting(program.averages, "start", "average")
    noting(program.publications, "start", "publish")
    for _ in range(2):
        seen.clear()
        buckets["publish"] = [program.root, *program.blocks]
        program.step(2, 0.0, 0.0)
    return seen


@pytest.mark.parametrize("name", ["hierarchical", "hpz", "hsdp", "mics"])
def test_it_starts_what_the_engine_starts_in_the_same_order(name):
    chosen = plan.named(name, FOUR)
    seen, expected = _simulated(chosen), launch(_started, 4, name, timeout_s=100)[0]
    if not chosen.sums_travel:  # nothing to send: the engine has it pass through in `step`
        seen, expected = ([each for each in those if each[0] != "average"] for those in (seen, expected))
    assert seen == expected and len(seen) > 30


def test_what_a_level_carries_are_the_bytes_of_the_checked_arithmetic():
    """Its links between nodes, and the rank's own link, which all leave through."""
    rates = (2e6, 5e5, 1.25e5)
    for name in plan.NAMED:
        sent = traffic.step_bytes(plan.named(name, TOPOLOGY), SHAPES, 2)
        busy = used(name, machine(rates), 2)
        assert busy["cluster"] == pytest.approx(sent["cluster"] / 8 / rates[2], rel=0.01)
        assert busy["package"] == pytest.approx(sum(sent.values()) / 8 / rates[0], rel=0.01)


def test_draws_are_refused():
    with pytest.raises(ValueError, match="a number for each parameter, found 3 draws"):
        seconds("ddp", machine((1e6, 1e6, np.array([1e6, 2e6, 3e6]))))


def test_the_step_model_simulates_where_all_ranks_share_the_processors():
    chosen = plan.hierarchical(TOPOLOGY)
    found = scaling.predict_step(chosen, POINT.gpt, machine((1e6, 1e6, 1e6), 1e8), compute_s=0.1)
    assert found.seconds == pytest.approx(seconds("hierarchical", machine((1e6, 1e6, 1e6), 1e8), passes_s=0.1))
    assert found.compute_s + found.exposed_s == found.seconds and found.hidden_s > 0
