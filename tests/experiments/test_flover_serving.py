"""The serving experiment end to end on the real model, with a workload of seconds."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from repro.baselines.batching import lone
from repro.experiments.base import MissingHardware
from repro.experiments.flover_serving import EXPERIMENT, ServingPoint
from repro.experiments.flover_serving import run as serving
from repro.flover.report import ServingReport
from repro.flover.request import Request
from repro.models import checkpoint
from repro.models.llama import Llama
from repro.plan import jobs as plan

CORES = serving._physical_cores
METRICS = {"total_seconds", "tokens_per_s", "iterations", "output_tokens", "slot_moves", "moved_bytes"}
METRICS |= {f"{name}_{kind}" for name in ("latency", "ttft") for kind in ("mean", "p50", "p99")}
METRICS |= {"waste_fraction", "tokens_equal_fraction", "single_request_seconds"}


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """A point takes all cores, and other tests may run beside this one."""
    monkeypatch.setattr(serving, "_physical_cores", torch.get_num_threads)


def served(**fields):
    try:
        checkpoint.smollm2_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    point = ServingPoint(**fields)
    outcome = EXPERIMENT.check(EXPERIMENT.run(point))
    assert outcome.metrics.with_units().keys() >= METRICS
    assert outcome.metrics.tokens_equal_or_tied_fraction == 1.0
    return point, outcome, outcome.metrics.model_dump(exclude_none=True)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fused", "static"])
def test_a_short_run_is_token_exact(engine):
    point, outcome, _ = served(engine=engine, requests=5, batch_size=2, max_slots=3, length_scale=0.1, time_scale=0.02)
    assert (outcome.metrics.tpot_mean is not None) == (engine == "fused")  # static answers come in one piece
    assert outcome.metrics.tokens_checked == 5 and len(outcome.series) == 5
    assert outcome.metrics.output_tokens == outcome.series.output_tokens.sum() == 4 + 11 + 6 + 2 + 2
    assert (outcome.metrics.waste_fraction > 0) == (engine == "static")
    assert outcome.conditions["scales"].startswith("Azure 2023 conversations from row 0: gaps x 0.02, lengths x 0.1")
    assert engine in point.label


@pytest.mark.slow
def test_windows_in_lone_requests_times_and_what_the_model_says_of_them():
    fields = {"requests": 3, "workload": "fixed", "length_scale": 0.02, "batch_size": 4}  # never full
    point, _, metrics = served(engine="dynamic", interval_t1=0.1, window_t1=2.0, predict=True, **fields)
    assert metrics["window_seconds"] == pytest.approx(20 * metrics["mean_interval_seconds"])  # 2 T1 and 0.1 T1
    assert metrics["iterations"] == 9 and metrics["waste_fraction"] == 0  # one batch of equal answers of 10 tokens
    assert metrics["latency_first"] == metrics["total_seconds"] > metrics["window_seconds"]
    for name in ("total_seconds", "latency_mean", "latency_p99"):
        assert metrics[f"error_{name}"] == pytest.approx(metrics[f"predicted_{name}"] / metrics[name] - 1)
        units = EXPERIMENT.metrics.units()
        assert units[f"predicted_{name}"] == "s" and units[f"error_{name}"] == "1"
    assert metrics["predicted_total_seconds"] > metrics["window_seconds"]
    assert point.label.startswith("dynamic4-2T1-predicted-fixed-n3")


def test_requests_decoded_alone_before_are_not_decoded_again(monkeypatch):
    """By instances all of them are, since the model is gone while these run."""
    decoded, lone = [], serving.lone
    monkeypatch.setattr(serving, "lone", lambda model, ask, room: decoded.append(len(ask)) or lone(model, ask, room))
    fields = {"model": "random-40m", "dtype": "bfloat16", "requests": 2, "workload": "fixed", "length_scale": 0.02}
    _, outcome, metrics = served(engine="instances", interval_t1=0.1, check_tokens=False, **fields)
    assert (
        decoded == [1] * 7  # a warm-up and five of the first, then the second
        and outcome.conditions["lone_reference"] == "2 of 2 requests, 2 of them before the timed run"
    )
    assert metrics["tokens_equal_fraction"] == 1 and metrics["largest_gap"] == 0
    assert outcome.conditions["threads"].endswith("per instance")


def test_t1_is_a_median_so_that_one_slow_moment_is_no_other_load(monkeypatch):
    took = iter([9.0, 2.0, 7.0, 1.0, 3.0, 2.5])  # the first is the warm-up
    monkeypatch.setattr(
        serving, "lone", lambda model, ask, room: [SimpleNamespace(request=ask[0], service_s=next(took))]
    )
    requests = [Request(number, (1, 2), 3) for number in range(32)]
    (found,) = serving._alone_before(None, requests, 5)
    assert found.service_s == 2.5


@pytest.mark.parametrize(("took", "counts"), [([9.0, 1.0, 2.0], 2.0), ([11.0], 11.0)])
def test_of_three_passes_over_a_short_workload_the_median_counts(monkeypatch, took, counts):
    """For all metrics, and beside the prediction. The pass that is thrown away before has other requests."""
    seconds = iter([0.5, *took])

    def serve(point, model, requests, capacity, window_s):
        report = ServingReport(lone(model, requests, capacity), total_seconds=next(seconds))
        for generation in report.generations:
            generation.finish_s = generation.request.arrived_s + report.total_seconds
        return report

    monkeypatch.setattr(serving, "_serve", serve)
    fields = {"workload": "fixed", "length_scale": 0.006, "interval_s": 0.0, "predict": True}
    outcome = EXPERIMENT.run(ServingPoint(model="random-40m", requests=2, **fields))
    found = outcome.metrics
    assert [found.total_seconds, found.latency_mean, found.latency_first] == pytest.approx([counts] * 3)
    assert (found.fastest_pass_seconds, found.slowest_pass_seconds) == (min(took), max(took))
    assert found.error_total_seconds == pytest.approx(found.predicted_total_seconds / counts - 1)
    assert outcome.series.finish_s.tolist() == [counts] * 2 and next(seconds, None) is None


def test_where_the_system_tells_no_physical_cores_all_are_used(monkeypatch):
    monkeypatch.setattr(serving.psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(serving.os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    assert CORES() == 6


@pytest.mark.parametrize(
    ("dtype", "tied"), [(torch.float32, 1 / 4), (torch.float16, 2 / 4), (torch.bfloat16, 2 / 4)], ids=str
)
def test_a_near_tie_is_of_a_few_roundings(dtype, tied):
    found = serving._agreement([None, 5e-3, 0.5, math.inf], dtype)
    assert (found["tokens_equal_fraction"], found["tokens_equal_or_tied_fraction"]) == (1 / 4, tied)
    assert found["largest_gap"] == 0.5 and found["tokens_checked"] == 4


@pytest.mark.parametrize(("instances", "fits"), [(0, True), (4, True), (8, False)])
def test_a_model_that_a_gpu_has_no_room_for_is_skipped(monkeypatch, instances, fits):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    memory = SimpleNamespace(total_memory=150e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(Llama, "random", lambda *given, **options: "a model")
    fields = {"engine": "instances", "instances": instances} if instances else {}
    point = ServingPoint(device="cuda", dtype="float16", model="random-13b", **fields)
    with contextlib.nullcontext() if fits else pytest.raises(MissingHardware, match=r"206 GB .* 8 times .* 90% of"):
        assert serving.inputs.model(point) == "a model"


def test_random_weights_of_a_size_are_served_token_for_token():
    point, outcome, metrics = served(
        model="random-40m", dtype="bfloat16", requests=3, workload="fixed", length_scale=0.02, interval_s=0.01
    )
    assert metrics["tokens_equal_fraction"] == 1 and metrics["output_tokens"] == 30
    assert outcome.conditions["weights"] == "LLaMA, 40M, random weights in bfloat16"
    assert point.label == "fused-random-40m-fixed-n3-bfloat16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_point_on_one_is_skipped():
    with pytest.raises(MissingHardware, match="device is cuda, and torch sees no"):
        EXPERIMENT.run(ServingPoint(device="cuda", model="random-1b"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["smollm2-135m", "random-40m"])
def test_a_short_run_on_a_gpu(model):
    """Half precision on a GPU rounds by the shape of the batch, so tokens may differ: the record says how many do."""
    outcome = EXPERIMENT.run(ServingPoint(device="cuda", dtype="float16", model=model, requests=5, length_scale=0.1))
    assert EXPERIMENT.check(outcome).conditions["kernels"] == "Triton"
    assert outcome.metrics.tokens_checked == 5


@pytest.mark.slow
def test_instances_are_processes_with_the_whole_model():
    fields = {"requests": 3, "workload": "sharegpt", "length_scale": 0.01, "interval_s": 0.05}
    _, outcome, metrics = served(engine="instances", instances=2, predict=True, **fields)
    assert metrics["instance_bytes"] > 134e6 * 4 and metrics["instances_bytes"] == 2 * metrics["instance_bytes"]
    assert set(outcome.series.slot) <= {0, 1} and outcome.conditions["threads"].endswith("per instance")
    # Rows 2358,531; 1034,769; 1320,769 of the file.
    assert outcome.series[["prompt_tokens", "output_tokens"]].values.tolist() == [[24, 5], [10, 8], [13, 8]]
    assert metrics["predicted_total_seconds"] > 0
    assert outcome.conditions["scales"].startswith("ShareGPT lengths from row 0 x 0.01, prompts cut to 64")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"window_t1": 1.0}, "only the engine dynamic has a window"),
        ({"engine": "dynamic", "window_s": 1.0, "window_t1": 1.0}, "window_s is 1.0 and window_t1 1.0: one of them"),
        ({"instances": 2}, "instances is 2, instance_threads 0: only for the engine instances"),
        ({"engine": "static", "layout": "fixed"}, "layout is fixed: only for the engine fused"),
        ({"engine": "serial", "prefill_tokens": 8}, "prefill_tokens is 8: only for the engine fused"),
        ({"interval_t1": 0.1}, "interval_t1 is 0.1: the trace azure has its own gaps"),
        ({"engine": "instances", "instance_threads": 1, "predict": True}, "predict with instance_threads 1"),
        ({"predict": True, "layout": "fixed"}, "predict with layout fixed"),
        ({"dtype": "float16"}, "dtype is float16 on the device cpu"),
    ],
)
def test_a_point_that_contradicts_itself_is_refused(fields, words):
    with pytest.raises(ValidationError, match=words):
        ServingPoint(**fields)


def test_a_label_names_the_window():
    jobs = [job for tier in ("laptop", "full") for job in plan.make(tier).jobs if job.experiment == "flover_serving"]
    labels = {job.point.label for job in jobs if job.point.workload == "fixed"}
    assert {f"dynamic32-{window}T1-random-40m-fixed-n32-bfloat16" for window in (0.22, 0.44, 0.88, 1.76)} <= labels
