"""Machines, sweeps, what decides, where plans cross."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from repro import scaling, zero
from repro.scaling import step
from repro.scaling.assumptions import PRIORS
from repro.scaling.machines import Interval

FRONTIER = scaling.hardware("frontier")


@pytest.mark.parametrize("name", scaling.CATALOGUE)
def test_every_machine_predicts_every_plan(name):
    machine = scaling.hardware(name)
    found = scaling.sweep([machine], [2], [scaling.gpt(5e9)], ["zero3", "zeropp", "hierarchical"], draws=16)
    assert (found.seconds_low <= found.seconds).all() and (found.seconds <= found.seconds_high).all()
    assert (found.seconds_low < found.seconds_high).all(), "a prediction without a band"
    peak = machine.peak_flops / 1e12
    assert (found.tflops_high < peak).all() and (found.tflops > 0).all()


def test_frontiers_levels_are_those_of_the_paper():
    topology = FRONTIER.topology(48)
    assert topology.mesh_shape == (48, 4, 2)
    rates = np.array([level.bytes_per_s for level in topology.levels])
    assert rates / rates[-1] == pytest.approx([16, 4, 1])  # 200 : 50 : 12.5 GB/s


@pytest.mark.parametrize("sizes", [(2, 4, 48), (2, 0, 0), (2, -1, 0)])
def test_only_the_outermost_tier_takes_its_size_from_the_caller(sizes):
    """48 nodes would have been predicted whatever was asked for, or nodes of as many packages."""
    tiers = tuple(replace(tier, size=size) for tier, size in zip(FRONTIER.tiers, sizes, strict=True))
    with pytest.raises(ValueError, match=r"tiers have sizes \[2, .*0 for the last one"):
        replace(FRONTIER, tiers=tiers)


@pytest.mark.parametrize("parameters", [-1e9, 0, float("nan")])
def test_a_gpt_without_parameters_is_refused(parameters):
    with pytest.raises(ValueError, match=f"parameters is {parameters}, allowed: above 0"):
        scaling.gpt(parameters)


def test_parameters_stay_in_their_intervals():
    rng = np.random.default_rng(0)
    drawn = Interval(1.0, 3.0, 10.0).draw(rng, 4000)
    assert 1 <= drawn.min() < 1.2 and 8.5 < drawn.max() <= 10
    assert np.median(drawn) == pytest.approx(3.1, rel=0.05)
    share = Interval(0.0, 0.2, 0.6).draw(rng, 4000)  # what may be 0 has no logarithm
    assert 0 <= share.min() < 0.02 and 0.55 < share.max() <= 0.6 and share.mean() == pytest.approx(0.8 / 3, rel=0.03)
    for wrong in ((2, 1, 3), (-1, 0, 1), (0, 0, 0)):
        with pytest.raises(ValueError, match="low <= likely"):
            Interval(*wrong)


def test_a_fixed_parameter_does_not_move_the_others():
    free = FRONTIER.machine(4, draws=50)
    fixed = FRONTIER.at(gemm=0.4).machine(4, draws=50)
    assert np.array_equal(free.hbm_bytes_per_s, fixed.hbm_bytes_per_s)
    assert fixed.flops_per_s == pytest.approx(0.4 * FRONTIER.peak_flops)
    assert FRONTIER.at(overlap=1.0).machine(4).overlap == 1.0
    with pytest.raises(ValueError, match=r"'speed'.*known: gemm"):
        FRONTIER.at(speed=1.0)
    with pytest.raises(ValueError, match=r"unknown hardware 'cray'.*frontier"):
        scaling.hardware("cray")


@pytest.mark.parametrize("parameters", [1e8, 1e9, 20e9, 175e9, 1e12])
def test_a_gpt_has_about_the_parameters_asked_for(parameters):
    assert scaling.gpt(parameters).parameters == pytest.approx(parameters, rel=0.1)


def test_sensitivity_ranks_the_parameters_by_what_they_change():
    config = scaling.gpt(10e9)

    def seconds(machine, assumed):
        return float(scaling.predict("zero3", config, machine, 8, micro_batch=8, draws=0, assumed=assumed).seconds)

    table = scaling.sensitivity(FRONTIER, seconds)
    assert set(table.parameter) == {*FRONTIER.intervals(), *PRIORS}
    assert list(table.swing) == sorted(table.swing, reverse=True)
    gemm = table[table.parameter == "gemm"].iloc[0]
    assert gemm.at_high < gemm.likely < gemm.at_low, "faster products, shorter steps"
    assert table.parameter[0] == "gemm", "a step that is mostly compute depends on it most"
    swings = table.set_index("parameter").swing
    assert swings["all_to_all"] == swings["quantize_slowdown"] == swings["secondary"] == 0, "ZeRO-3 has none of them"


def test_of_plans_as_fast_the_smallest_that_fits_is_best():
    same = {"hardware": "h", "nodes": 1, "ranks": 8, "parameters": 1, "accumulation": 1}
    rows = [
        same | {"plan": "big", "seconds": 1.0, "gigabytes": 9.0, "fits": True},
        same | {"plan": "small", "seconds": 1.005, "gigabytes": 3.0, "fits": True},
        same | {"plan": "slow", "seconds": 1.2, "gigabytes": 1.0, "fits": True},
        same | {"plan": "huge", "seconds": 0.1, "gigabytes": 99.0, "fits": False},
        same | {"plan": "huge", "seconds": 0.1, "gigabytes": 99.0, "fits": False, "nodes": 2},
    ]
    found = scaling.best_plan(pd.DataFrame(rows)).set_index("nodes").plan
    assert found[1] == "small"
    assert found[2] == "none fits"


NAMED = ("ddp", "zero3", "hpz", "zeropp", "mics", "hierarchical", "hierarchical_fp")


def both_searches(config, accumulation):
    """All plans by messages one after the other, and by messages behind as much compute as hides any, on 48 nodes."""
    machine = FRONTIER.at(overlap=0.7).machine(48)
    options = {"gradient_bytes": 2, "activations": step.activations(config), "micro_batches": accumulation}
    alone = zero.search(step.layout_of(config), machine.topology, machine.memory_bytes, **options)
    return alone, scaling.search(config, machine, accumulation=accumulation)


def test_both_costs_rank_the_same_plans_in_other_orders():
    """Alone, messages are cheapest where the weights are whole on every rank. Behind compute they cost nothing at any
    level, so the plan that needs least memory is as fast as any, and comes first."""
    alone, overlapped = both_searches(scaling.gpt(20e9), accumulation=8)
    assert {(c.plan.name, c.rank_bytes) for c in alone} == {(c.plan.name, c.rank_bytes) for c in overlapped}
    assert alone[0].plan.name == "-/node/cluster"
    assert overlapped[0].plan.name == "cluster/cluster/cluster"


def test_a_step_without_compute_hides_nothing_and_the_orders_agree():
    """The two costs then differ only in what `scaling` knows of memory, latency and rings: one plan first in both."""
    config = scaling.gpt(20e9)
    slow = scaling.with_network(FRONTIER, 1e-3)
    alone = zero.search(
        *(step.layout_of(config), slow.machine(48).topology, 64e9),
        gradient_bytes=2,
        activations=step.activations(config),
    )
    overlapped = scaling.search(config, slow.at(overlap=0.3).machine(48), compute_s=0.0)
    assert alone[0].plan.name == overlapped[0].plan.name


def test_the_best_of_a_sweep_is_the_best_of_a_search_among_the_same_plans():
    config = scaling.gpt(20e9)
    searched = scaling.search(
        config, FRONTIER.machine(48), plans=[zero.plan.named(name, FRONTIER.topology(48)) for name in NAMED]
    )
    swept = scaling.sweep([FRONTIER], [48], [config], NAMED, draws=0)
    rows = swept[swept.fits].set_index("plan")
    assert {c.plan.name: c.step_s for c in searched} == pytest.approx(rows.seconds.to_dict())
    assert {c.plan.name: c.rank_bytes / 1e9 for c in searched} == pytest.approx(rows.gigabytes.to_dict())
    close = [c for c in searched if c.step_s <= 1.01 * searched[0].step_s]
    assert scaling.best_plan(swept).plan[0] == min(close, key=lambda c: c.rank_bytes).plan.name


def test_a_search_counts_the_gradients_that_it_is_told_to():
    config, machine = scaling.gpt(1e9), FRONTIER.machine(2)
    plans = [zero.plan.named("ddp", machine.topology)]
    two, four = (scaling.search(config, machine, plans=plans, **wider)[0] for wider in ({}, {"gradient_bytes": 4}))
    assert four.rank_bytes - two.rank_bytes == pytest.approx(2 * config.parameters, rel=1e-3)
    assert four.step_s == two.step_s


def test_plans_cross_where_the_network_is_slow_enough():
    config, hides = scaling.gpt(20e9), FRONTIER.at(overlap=0.7)  # where little hides they do not cross
    at = scaling.crossover(
        *("hierarchical", "zeropp", config, lambda factor: scaling.with_network(hides, factor), 2**-8, 2**4, 48),
        accumulation=8,
    )
    assert at is not None

    def faster(factor):
        machine = scaling.with_network(hides, factor)
        a, b = (
            scaling.predict(n, config, machine, 48, accumulation=8, draws=0).seconds for n in ("hierarchical", "zeropp")
        )
        return a < b

    assert faster(at / 1.05) and not faster(at * 1.05)
    never = scaling.crossover(
        "zero3", "zero3", config, lambda factor: scaling.with_network(FRONTIER, factor), 0.1, 1, 4
    )
    assert never is None
    with pytest.raises(ValueError, match="low is 0 and high 1, allowed: 0 < low < high"):
        scaling.crossover("zero3", "ddp", config, lambda overlap: FRONTIER.at(overlap=overlap), 0, 1, 4)


def test_the_largest_model_is_the_papers_ceiling():
    """1.25 psi + 12 psi / N bytes a GCD of 64 GB: below 51 billion parameters."""
    assert scaling.largest_model("hierarchical", FRONTIER, 48) == pytest.approx(64e9 / (1.25 + 12 / 384))
    assert scaling.largest_model("zero3", FRONTIER, 48) == pytest.approx(64e9 * 384 / 16)


def test_a_sweep_lays_a_model_out_once():
    """A row costs milliseconds because of that: laying out 44 blocks takes half a second."""
    config = scaling.gpt(2.1e9)
    before = step.layout_of.cache_info().misses
    scaling.sweep([FRONTIER], [1, 4, 4096], [config], ["zero3", "hierarchical"], draws=0)
    assert step.layout_of.cache_info().misses == before + 1
