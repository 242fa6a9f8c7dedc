"""The experiments of the scaling model at small points: real ranks are probed and trained, predictions come with bands."""

import math

import numpy as np
import pandas as pd
import pytest

from repro import experiments, scaling
from repro.emulate import netns
from repro.experiments.common.modelled import paper_gpt
from repro.experiments.fabric_probe.run import FASTER
from repro.experiments.scaling_decode import BATCHES, ScalingDecode
from repro.experiments.scaling_decode.run import _batches
from repro.experiments.scaling_map import PLANS
from repro.experiments.scaling_map.run import FACTORS, MEMORIES_GB
from repro.experiments.scaling_step import PAPER
from repro.experiments.scaling_step.run import CALIBRATED, _first_over_fastest
from repro.experiments.scaling_train import RATIOS
from repro.experiments.scaling_train.run import SETUP_S, train_seconds
from repro.experiments.zero_train import ZeroTrain
from repro.scaling import ladder

pytestmark = pytest.mark.xdist_group("network")
SHAPED = pytest.mark.skipif(netns.unavailable() is not None, reason=f"no shaped network: {netns.unavailable()}")
BANDED = [
    ("scaling_train", {"nodes": 2, "draws": 40}),
    ("scaling_decode", {"experts": 8, "gpus": 8, "draws": 40, "time_limit_s": 1}),
    ("scaling_serving", {"requests": 4, "draws": 5}),
]


def run(name, **values):
    experiment = experiments.get(name)
    return experiment.check(experiment.run(experiment.parameters(**values)))


@pytest.mark.parametrize(("name", "values"), BANDED, ids=[name for name, _ in BANDED])
def test_every_prediction_has_a_band_around_it(name, values):
    outcome = run(name, **values)
    assert outcome.evidence == "modelled"
    found = outcome.metrics.model_dump(exclude_none=True)
    middles = [key.removesuffix("_low") for key in found if key.endswith("_low")]
    assert middles
    for key in middles:
        assert found[f"{key}_low"] <= found[key] <= found[f"{key}_high"], key
    assert any(found[f"{key}_low"] < found[f"{key}_high"] for key in middles)


def test_the_band_of_a_ratio_is_that_of_paired_draws():
    found = run("scaling_train", nodes=8, draws=200).metrics.model_dump()
    for name, (ours, theirs) in RATIOS.items():
        fastest = found[f"step_seconds_{theirs}_high"] / found[f"step_seconds_{ours}_low"]
        slowest = found[f"step_seconds_{theirs}_low"] / found[f"step_seconds_{ours}_high"]
        assert slowest < found[f"{name}_low"] <= found[f"{name}_high"] < fastest


def test_published_steps_are_predicted_with_a_fitted_overlap():
    outcome = run("scaling_validation", draws=100)
    found, table = outcome.metrics, outcome.series
    assert found.overlap_low <= found.overlap < 0.3 and found.overlap_high < 0.7
    assert (
        found.rms_log_error < found.rms_log_error_left_out < 0.1 < 2 * found.rms_log_error < found.rms_log_error_assumed
    )
    assert found.within_band_machine < 0.75 < found.within_band, "the model's own error is needed"
    # As docs/scaling.md says.
    assert found.rms_log_error_held_out == pytest.approx(0.109, abs=0.005)
    assert math.exp(found.tflops_log_bias) == pytest.approx(1.03, abs=0.01)
    assert found.tflops_log_spread == pytest.approx(0.12, abs=0.01)
    points = table[table.kind == "point"]
    assert points.left_out.notna().tolist() == points.fitted.astype(bool).tolist()


def test_the_ladder_tells_its_priors_and_keeps_some_draws():
    outcome = run("scaling_ladder", draws=50)
    assert outcome.metrics.share_all < outcome.metrics.share_efficiency
    assert outcome.metrics.changes == (outcome.series.kind == "single").sum()
    assert "quantize_slowdown: 1 to 20, log-uniform" in outcome.conditions["priors"]
    drawn = outcome.series[outcome.series.kind == "draw"]
    assert drawn.typical.sum() == min(2000, outcome.metrics.draws) == 1200
    joint = outcome.series[outcome.series.kind == "joint"]
    assert len(joint) == 12 and joint[[*ladder.JOINT, "share", "of_reached"]].notna().to_numpy().all()


def test_the_band_holds_what_is_not_known_of_the_engine():
    """Of ZeRO++ against ZeRO-3 it is wider than with an engine that is known."""
    found = run("scaling_train", nodes=8, draws=200).metrics
    config, frontier = paper_gpt("gpt-20b", 2048), scaling.hardware("frontier")
    zero3, zeropp = (scaling.predict(name, config, frontier, 8, draws=200).seconds for name in ("zero3", "zeropp"))
    low, high = np.quantile(zero3 / zeropp, [0.05, 0.95])
    assert found.zeropp_over_zero3_high - found.zeropp_over_zero3_low > 1.3 * (high - low)


def test_efficiency_is_counted_from_the_fewest_nodes_that_hold_the_plan():
    found = run("scaling_train", nodes=2, draws=20).metrics
    assert found.efficiency_hierarchical == 1 and found.fits_hierarchical, "one node does not hold it, two do"
    assert found.efficiency_ddp is None and not found.fits_ddp


def test_the_map_says_where_nothing_fits():
    outcome = run("scaling_map", over="network_memory", nodes=2, billions=100)
    table = outcome.series
    assert len(table) == len(FACTORS) * len(MEMORIES_GB)
    assert (table[table.memory_gb == 16].plan == "none fits").all()
    assert set(table.plan) <= {*PLANS, "none fits"}
    with pytest.raises(ValueError, match="most_ranks is 64, a node of gb200-nvl72 alone has 72"):
        run("scaling_map", over="size_ranks", hardware="gb200-nvl72", most_ranks=64)


def test_tokens_of_a_gpu_are_drawn_alike_by_the_same_seed():
    drawn, again, other = (_batches(ScalingDecode(draws=60, seed=seed)) for seed in (0, 0, 1))
    assert (drawn == again).all() and (drawn != other).any()
    assert [(drawn == batch).sum() for batch in BATCHES] == [10] * len(BATCHES), "each as often"
    assert set(_batches(ScalingDecode(draws=60, tokens_per_gpu=16))) == {16}


def test_the_band_holds_the_batches_that_are_drawn():
    """One of them alone says on which side of no gain the speedup lies."""
    point = {"experts": 8, "gpus": 4, "draws": 240}
    drawn, again, few, many = (run("scaling_decode", **point, tokens_per_gpu=n).metrics for n in (0, 0, 16, 512))
    assert drawn == again
    widths = [found.speedup_over_deepspeed_high - found.speedup_over_deepspeed_low for found in (drawn, few, many)]
    assert widths[0] > max(widths[1:])
    assert drawn.all_to_all_share_deepspeed_low < few.all_to_all_share_deepspeed_low
    assert drawn.all_to_all_share_deepspeed_high > many.all_to_all_share_deepspeed_high
    assert few.padding_deepspeed_low == few.padding_deepspeed_high == drawn.padding_deepspeed_high
    assert many.padding_deepspeed == drawn.padding_deepspeed_low < drawn.padding_deepspeed


def test_even_load_is_predicted_against_an_even_baseline():
    found = run("scaling_decode", experts=8, gpus=8, draws=1000, time_limit_s=1).metrics
    assert found.max_load_affinity > 1
    assert found.speedup_balanced > found.speedup_placed


def test_deepspeed_is_predicted_with_its_padding():
    found = run("scaling_decode", experts=8, gpus=8, draws=1000, tokens_per_gpu=512, time_limit_s=1).metrics
    assert found.padding_deepspeed > found.padding_deepspeed_even > found.padding_deepspeed_dropping == 1
    assert found.speedup_over_deepspeed > found.speedup_placed > found.speedup_over_deepspeed_dropping
    assert found.speedup_over_deepspeed_even > found.speedup_balanced
    assert found.routing_s_deepspeed > found.routing_s_two_all_to_alls > found.routing_s_deepspeed_dropping
    assert 0 < found.all_to_all_share_placed < found.all_to_all_share_two_all_to_alls < 1


def test_gathers_of_new_tokens_are_part_of_the_routing():
    """As in `moe_decode`: of two modes that differ in a gather alone, the one with more saves less."""
    found = run("scaling_decode", experts=8, gpus=8, draws=1000, tokens_per_gpu=512, time_limit_s=1).metrics
    assert found.routing_s_kv_sent > found.routing_s_placed
    assert found.routing_reduction_kv_sent < found.routing_reduction_placed
    of_all_to_alls = found.all_to_all_share_placed * 8 * 512 / found.tokens_per_s_placed
    assert found.routing_s_placed > 1.05 * of_all_to_alls


def test_a_fused_server_is_predicted_faster_than_instances_that_share():
    outcome = run("scaling_serving", requests=8, draws=4)
    assert outcome.metrics.speedup_over_instances > 2
    assert list(outcome.series.requests) == [1, 2, 4, 8]


@pytest.mark.parametrize(("source", "end"), [("a100_node", "here"), ("lumi", "here but peer_s, from these rows")])
def test_what_the_catalogue_has_of_the_predicted_rows_is_said(source, end):
    said = run("scaling_network", source=source, split="machine").conditions["parameters"]
    assert said.startswith("of ") and said.endswith(f"none fitted {end}")


def test_a_probe_of_ranks_without_a_shaped_network():
    outcome = run("fabric_probe", nodes=2, packages=1, gcds=2, largest_kib=64, repeats=2, fabric="unshaped")
    assert outcome.conditions["fabric"].startswith("unshaped")
    table = outcome.series
    assert set(table.hop) == {"package", "cluster", "package+node+cluster"}
    assert set(table.collective) == {"all_gather", "reduce_scatter"}
    assert (table.seconds > 0).all() and not table.duplicated(["collective", "hop", "nbytes"]).any()
    assert 0 < table.fitted.mean() < 1


@SHAPED
def test_a_probe_finds_the_rates_that_the_links_are_shaped_to():
    """Between nodes 25 Mbit/s per rank, which no processor hides; four times that in a node. A busy machine makes transfers
    slower, never faster; what of a fast link's time is the processors' a fit of a busy machine cannot tell."""
    outcome = run("fabric_probe", gcds=1, largest_kib=512, repeats=2)
    assert outcome.evidence == "emulated"
    cluster, node = outcome.metrics.cluster_bytes_per_s, outcome.metrics.node_bytes_per_s
    assert 0.3 * 25e6 / 8 < cluster < 1.33 * 25e6 / 8
    assert cluster < node
    assert set(outcome.series.scale) == {1, FASTER}
    largest = outcome.series[outcome.series.nbytes == outcome.series.nbytes.max()]
    for hop, bits_per_s in ("cluster", 25e6), ("node", 100e6):
        times = largest[largest.hop == hop]
        assert len(times) == 4, "two collectives, with slow and with fast links"
        sent = times.nbytes / 2  # by each of the two members of a group
        assert (times.seconds > sent / (1.33 * times.scale * bits_per_s / 8)).all()


@SHAPED
@pytest.mark.exhaustive
def test_steps_are_predicted_from_the_probe_and_then_trained():
    outcome = run("scaling_step", plans="paper", rates="50,100", packages=1, gcds=1, steps=3, repeats=1)
    table = outcome.series
    assert list(table.plan) == 2 * list(PAPER)
    assert list(table.cluster_mbit_s) == 4 * [50.0] + 4 * [100.0]
    assert set(table[table.calibrated].plan) == set(CALIBRATED)
    assert set(table[table.calibrated].cluster_mbit_s) == {50.0}
    # Not a test of the model's accuracy, which a busy machine decides; that a prediction is of the measured thing.
    assert (np.abs(table.log_error) < np.log(4)).all()


def test_what_trusting_the_prediction_costs_is_that_of_the_worst_rate():
    rates, measured, predicted = [25, 25, 50, 50], [2.0, 3.0, 1.0, 1.1], [1.0, 9.0, 8.0, 2.0]
    table = pd.DataFrame({"cluster_mbit_s": rates, "measured": measured, "predicted": predicted})
    assert _first_over_fastest(table) == pytest.approx(1.1)
    assert _first_over_fastest(table[:2]) == 1


def test_the_plan_of_a_platform_asks_for_its_hardware():
    def seconds(**values):
        return train_seconds(ZeroTrain(packages=4, layers=44, hidden=6144, heads=64, **values), "frontier")

    few, many = seconds(nodes=2, steps=12), seconds(nodes=2, steps=24)
    assert few > SETUP_S
    assert many - SETUP_S == pytest.approx(2 * (few - SETUP_S))
    assert seconds(nodes=2, plan="deepspeed_zero3") == seconds(nodes=2, plan="zero3")
    assert train_seconds(ZeroTrain(packages=1, gcds=4), "frontier") is None, "another shape of node"
    assert train_seconds(ZeroTrain(packages=4, fabric="unshaped"), "frontier") is None
