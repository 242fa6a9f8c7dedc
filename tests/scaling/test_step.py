"""The step model against the arithmetic that the ledger of real runs is checked with, and in its limits."""

import math
from dataclasses import replace

import numpy as np
import pytest

from repro import scaling
from repro.experiments.zero_train import ZeroTrain
from repro.models.gpt import GPTConfig
from repro.scaling import step
from repro.scaling.assumptions import DEEPSPEED, Assumptions
from repro.scaling.machines import Machine
from repro.scaling.network import network_of
from repro.zero import plan, traffic

CONFIG = GPTConfig(4, 512, 8, 128, 1024, checkpointing=True)
IN_TURN = Assumptions(side_by_side=0.0)  # level after level, as the arithmetic of `traffic` has it


def bare(topology, **options):
    """Bytes over rates and nothing else."""
    same = {"flops_per_s": math.inf, "hbm_bytes_per_s": math.inf, "launch_s": 0.0, "overlap": 0.0}
    return Machine(network_of(topology), **same | {"quantize_values_per_s": math.inf, "native": False} | options)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", sorted(plan.NAMED))
def test_bytes_over_rates_are_those_of_the_checked_arithmetic(name, accumulation):
    point = ZeroTrain(plan=name, nodes=4)
    chosen, shapes = plan.named(name, point.topology), step.layout_of(point.gpt)
    found = scaling.predict_step(chosen, point.gpt, bare(point.topology), 1, accumulation, 0.0, IN_TURN)
    assert found.seconds == pytest.approx(traffic.step_seconds(chosen, shapes, accumulation), rel=1e-3)


def test_values_that_are_quantised_are_those_of_the_checked_arithmetic():
    point = ZeroTrain(plan="hierarchical")
    chosen, shapes = plan.named("hierarchical", point.topology), step.layout_of(point.gpt)
    rate = 1e7
    found = scaling.predict_step(chosen, point.gpt, bare(point.topology, quantize_values_per_s=rate), compute_s=0.0)
    counted = sum(
        c.times * (hop.quantised + hop.restored)
        for c in traffic.collectives(chosen, shapes)
        for hop in traffic.hops(c, point.topology)
    )
    assert found.quantize_s == pytest.approx(counted / rate, rel=1e-3)


def test_overlap_hides_messages_behind_compute():
    """Of an engine that waits at the end of a step, not those there."""
    topology = ZeroTrain().topology
    chosen = plan.named("hierarchical", topology)
    none, full, waits = (
        scaling.predict_step(chosen, CONFIG, bare(topology, overlap=share), compute_s=1e6, assumed=assumed)
        for share, assumed in ((0.0, step.OURS), (1.0, step.OURS), (1.0, DEEPSPEED))
    )
    assert none.hidden_s == 0 and full.exposed_s == pytest.approx(0)
    assert 0 < waits.exposed_s < none.exposed_s
    assert full.hidden_s + full.exposed_s == pytest.approx(none.exposed_s)
    # Without compute there is nothing to hide behind.
    alone = scaling.predict_step(chosen, CONFIG, bare(topology, overlap=1.0), compute_s=0.0)
    assert alone.exposed_s == pytest.approx(none.exposed_s)


@pytest.mark.parametrize("name", ["ddp", "zero3", "hierarchical"])
def test_copies_are_made_in_every_pass_and_the_update_once(name):
    """A rank that keeps all gradients adds all of them up; one that keeps a part of the states updates that part."""
    chosen = plan.named(name, ZeroTrain().topology)
    machine = bare(ZeroTrain().topology, hbm_bytes_per_s=1.0)
    one, two, three = (step.streaming_seconds(chosen, 10, machine, passes) for passes in (1, 2, 3))
    kept, updated = {"ddp": (1, 1), "zero3": (1 / 8, 1 / 8), "hierarchical": (1 / 4, 1 / 8)}[name]
    assert three - two == two - one == pytest.approx(10 * (8 + 4 + 6 + 12 * kept))
    assert one - (two - one) == pytest.approx(10 * 34 * updated)


def test_compute_is_flops_over_the_rate_that_products_reach():
    topology = scaling.hardware("frontier").topology(2)
    machine = bare(topology, flops_per_s=1e14, overlap=1.0, native=True)
    config = GPTConfig(44, 6144, 64, 2048, 50432, checkpointing=True)
    found = step.compute_seconds(config, machine, micro_batch=2, accumulation=3)
    tokens = 2 * 3 * 2048
    forward = 2 * config.parameters * tokens  # and attention, a twelfth of s / h
    assert found == pytest.approx(4 * forward / 1e14, rel=0.1)
    assert step.model_flops(config, 6) == pytest.approx(3 * forward, rel=0.1)


def test_small_layers_are_less_efficient():
    machine = scaling.hardware("frontier").machine(1)

    def efficiency(hidden):
        config = GPTConfig(4, hidden, 8, 128, 1024, checkpointing=True)
        return step.model_flops(config, 1) * 4 / 3 / step.compute_seconds(config, machine, 1, 1) / machine.flops_per_s

    assert efficiency(256) < efficiency(1024) < efficiency(4096) < 1


def test_the_critical_resource_is_named():
    slow = scaling.with_network(scaling.hardware("frontier"), 1e-3)
    config = scaling.gpt(1e9)
    assert scaling.predict("zero3", config, slow, 8, draws=0).critical == "cluster"
    assert (
        scaling.predict(
            "zero3", config, scaling.hardware("frontier"), 8, accumulation=1, micro_batch=8, draws=0
        ).critical
        == "compute"
    )


def test_draws_make_bands_and_pair_up():
    config, frontier = scaling.gpt(10e9), scaling.hardware("frontier")
    a, b = (scaling.predict(name, config, frontier, 8, draws=300) for name in ("zero3", "zeropp"))
    assert a.seconds.shape == (300,)
    # The same machines are in both, so their ratio is better known than that of two unrelated draws.
    other = scaling.predict("zeropp", config, frontier, 8, draws=300, seed=1).seconds
    assert (a.seconds / b.seconds).std() < 0.8 * (a.seconds / other).std()
    again = scaling.predict("zero3", config, frontier, 8, draws=300)
    assert np.array_equal(a.seconds, again.seconds)


def test_memory_decides_what_fits():
    config, frontier = scaling.gpt(100e9), scaling.hardware("frontier")
    assert not scaling.predict(
        "hierarchical", config, frontier, 48, draws=0
    ).fits  # 1.25 psi bytes a GCD: a ceiling of 51B
    assert scaling.predict("zero3", config, frontier, 48, draws=0).fits


def test_sums_of_gradients_count_as_wide_as_the_engine_keeps_them():
    """This package's engine adds up in fp32 by default: 2 bytes more of each value that a rank keeps. No other number changes."""
    config, frontier = scaling.gpt(10e9), scaling.hardware("frontier")
    two, four = (
        scaling.predict("zero3", config, frontier, 2, draws=0, **wider) for wider in ({}, {"gradient_bytes": 4})
    )
    assert four.rank_bytes - two.rank_bytes == pytest.approx(2 * config.parameters / 16, rel=1e-3)
    assert (four.seconds, four.flops, four.level_s) == (two.seconds, two.flops, two.level_s)
    between = replace(frontier, memory_bytes=(two.rank_bytes + four.rank_bytes) / 2)
    fits = [scaling.predict("zero3", config, between, 2, draws=0, gradient_bytes=wide).fits for wide in (2, 4)]
    assert fits == [True, False]


def test_a_plan_for_another_machine_is_refused():
    frontier = scaling.hardware("frontier")
    with pytest.raises(ValueError, match=r"levels of \(4, 4, 2\), the machine has \(2, 4, 2\)"):
        scaling.predict_step(plan.named("zero3", frontier.topology(4)), CONFIG, frontier.machine(2))


@pytest.mark.parametrize("name", ["micro_batch", "accumulation"])
def test_a_step_without_work_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} is 0, allowed: 1 and more"):
        scaling.predict("zero3", CONFIG, scaling.hardware("frontier"), 2, **{name: 0})


def test_one_ring_out_of_a_node_is_slower():
    config = scaling.gpt(10e9)
    frontier = scaling.hardware("frontier")
    single = replace(frontier, channels=1)
    four, one = (scaling.predict("zero3", config, machine, 8, draws=0) for machine in (frontier, single))
    assert one.level_s["cluster"] > 2 * four.level_s["cluster"]
