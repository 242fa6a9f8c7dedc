"""Figures of Flover: names of engines, and which runs are compared with each other."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from repro import paths
from repro.experiments.flover_serving import ServingPoint
from repro.report.figures import base, flover

SHIPPED = base.Data(paths.root() / "results/reference/laptop-2core/records")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def serving(*changes):
    """A table of runs, a row for each dict of point fields that differ from the default."""
    return pd.DataFrame([{**ServingPoint().model_dump(), "path": str(i), **fields} for i, fields in enumerate(changes)])


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"engine": "fused"}, "fused"),
        ({"engine": "fused", "max_slots": 8, "prefill_tokens": 16}, "fused, 8 slots, prompts by 16"),
        ({"engine": "fused", "admit_per_iteration": 1}, "fused, one admission an iteration"),
        ({"engine": "fused", "admit_per_iteration": 2}, "fused, 2 admissions an iteration"),
        ({"engine": "static", "batch_size": 8, "dtype": "bfloat16"}, "static, batches of 8, bfloat16"),
        ({"engine": "dynamic", "window_t1": 0.22}, "dynamic, window 0.22 T1"),
        ({"engine": "dynamic", "window_s": 2.0}, "dynamic, window 2 s"),
        ({"engine": "instances", "requests": 4, "instance_threads": 1}, "instances, 4 of them with a thread each"),
        ({"engine": "serial"}, "serial"),
    ],
)
def test_an_engine_is_named_with_what_differs_from_the_default(fields, name):
    assert flover.engine_name(serving(fields).iloc[0]) == name


def test_one_model_on_one_device():
    gpu = {"device": "cuda", "model": "random-13b"}
    table = serving(gpu, gpu, gpu, {"device": "cpu"}, {"device": "cpu"}, {"device": "cpu", "model": "random-40m"})
    assert set(flover.of_one_model(table).path) == {"5"}  # the CPU, and the model that the claims read
    others = table[table.model != flover.MODEL]
    assert set(flover.of_one_model(others).path) == {"3", "4"}  # else the model of most runs there
    assert set(flover.of_one_model(table, "random-13b").path) == {"0", "1", "2"}
    with pytest.raises(base.NothingToShow, match="model gpt-9"):
        flover.of_one_model(table, "gpt-9")


def test_engines_are_compared_on_the_requests_that_most_of_them_served():
    table = flover.of_one_model(
        serving(
            {"engine": "fused", "requests": 8},
            {"engine": "fused", "requests": 32},
            {"engine": "serial", "requests": 32},
            {"engine": "fused", "workload": "fixed"},
        )
    )
    assert set(flover.of_one_workload(table, "azure").path) == {"1", "2"}
    assert set(flover.of_one_workload(table[:2], "azure").path) == {"1"}  # as many engines: the most requests
    assert set(flover.of_one_workload(table, "fixed").path) == {"3"}
    assert set(flover.of_one_workload(table, "sharegpt").path) == {"1", "2"}  # not run: those of all
    assert list(flover.looks(table)) == ["fused", "serial"]


def test_published_times_start_with_one_request():
    seconds = flover.published_seconds()
    assert list(seconds) == ["GPT-J 6B", "LLaMA-13B", "LLaMA-33B", "LLaMA-65B"]
    assert all(set(values) == set(flover.WIDTHS) for values in seconds.values())


def test_options_choose_what_is_drawn():
    assert len(flover.flover_timeline(SHIPPED, engines=2).figure.axes) == 2
    assert "fixed arrivals" in flover.flover_latency(SHIPPED, workload="fixed").caption
    with pytest.raises(base.NothingToShow, match="longest 7"):
        flover.flover_layouts(SHIPPED, longest=7)
