"""Figures of Flover and SARATHI: names of engines, and which runs are compared with each other."""

import json

import pandas as pd
import pytest
from report import legible

from repro import paths
from repro.experiments.flover_serving import ServingPoint
from repro.records import record
from repro.report.figures import base, flover, flover_gpu, flover_layouts, flover_queue, flover_ranks, sarathi

SHIPPED = base.Data(paths.root() / "results/reference/laptop-2core/records")


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
        ({"engine": "fused", "layout": "paged"}, "fused, layout paged"),
        ({"engine": "static", "batch_size": 8, "dtype": "bfloat16"}, "static, batches of 8, bfloat16"),
        ({"engine": "dynamic", "window_t1": 0.22}, "dynamic, window 0.22 T1"),
        ({"engine": "dynamic", "window_s": 2.0}, "dynamic, window 2 s"),
        ({"engine": "instances", "requests": 4, "instance_threads": 1}, "instances, 4 of them with a thread each"),
        ({"engine": "serial"}, "serial"),
    ],
)
def test_an_engine_is_named_with_what_differs_from_the_default(fields, name):
    assert flover.engine_name(serving(fields).iloc[0]) == name


def test_the_first_row_of_the_pipeline_is_what_the_claims_read():
    _, right = sarathi.sarathi_pipeline(SHIPPED).figure.axes
    for claim, drawn in zip(("SA-3.a", "SA-3.b"), right.containers, strict=True):
        (mark, _, (spread,)), read = drawn.lines, SHIPPED.of_claim(claim)
        assert mark.get_xdata()[0] == read.value
        assert tuple(spread.get_segments()[0][:, 0]) == pytest.approx(read.interval)


def test_one_model_on_one_device():
    gpu = {"device": "cuda", "model": "random-13b"}
    table = serving(gpu, gpu, gpu, {"device": "cpu"}, {"device": "cpu"}, {"device": "cpu", "model": "random-40m"})
    assert set(flover.of_one_model(table).path) == {"5"}  # the CPU, and the model that the claims read
    others = table[table.model != flover.MODEL]
    assert set(flover.of_one_model(others).path) == {"3", "4"}  # else the model of most runs there
    assert set(flover.of_one_model(table, "random-13b").path) == {"0", "1", "2"}
    with pytest.raises(base.NothingToShow, match="model gpt-9"):
        flover.of_one_model(table, "gpt-9")


def test_a_model_on_a_gpu_stands_beside_the_paper_and_a_cpu():
    """FL-F4a.k: 129.59 s one after another over 11.44 s."""
    drawing = flover_gpu.flover_gpu(SHIPPED)
    (axes,) = drawing.figure.axes
    assert "11.3" in {text.get_text() for text in axes.texts} and len(axes.get_yticks()) == len(flover_gpu.ROWS)
    assert "on one NVIDIA H200" in drawing.caption


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
    lengths = flover.of_one_model(serving({"workload": "uniform"}, {"workload": "uniform", "longest": 1024}))
    assert len(flover.of_one_workload(lengths, "uniform")) == 1


def test_published_times_start_with_one_request():
    seconds = flover.published_seconds()
    assert list(seconds) == ["GPT-J 6B", "LLaMA-13B", "LLaMA-33B", "LLaMA-65B"]
    assert all(set(values) == set(flover.WIDTHS) for values in seconds.values())


def test_published_gains_over_ranks():
    """As v1 Fig. 10 prints them."""
    printed = [1.46, 1.5, 1.54, 1.6, 1.63, 1.67, 2.09, 2.34, 2.47, 2.97, 3.13, 3.3]
    assert [round(gain, 2) for gain in sorted(flover_ranks.printed_gains())] == printed


def test_a_rate_is_told_of_shaped_links_alone():
    run = {"ranks": 2, "nodes": 2, "layout": "window", "cluster_mbit_s": 50.0}
    names = [flover_ranks.ranks_name(pd.Series(run | {"fabric": fabric})) for fabric in ("shaped", "unshaped: no root")]
    assert names == ["2 ranks, 2 nodes at 50 Mbit/s", "2 ranks, 2 nodes"]


def test_options_choose_what_is_drawn():
    assert len(flover.flover_timeline(SHIPPED, engines=2).figure.axes) == 2
    uniform = flover.flover_latency(SHIPPED, workload="uniform")
    assert "answers of 64 to 512 tokens, drawn uniformly" in uniform.caption
    assert any(text.get_text().startswith("fused, layout paged") for text in uniform.figure.legends[0].texts)
    with pytest.raises(base.NothingToShow, match="longest 7"):
        flover_layouts.flover_layouts(SHIPPED, longest=7)


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ("every 0.055 times a lone request, answers of 512 x 0.125 tokens", "answers of 64 tokens"),
        ("answers of 128 to 1024, drawn uniformly, x 0.5 tokens", "answers of 64 to 512 tokens, drawn uniformly"),
        ("ShareGPT lengths from row 0 x 0.1, prompts cut to 400", "ShareGPT lengths from row 0 x 0.1"),
    ],
)
def test_lengths_are_in_tokens(scales, words):
    said = flover.setting(pd.Series({"scales": scales}))
    assert words in said and ("lone request" not in said or "a lone request's time," in said)


def test_a_dtype_of_all_runs_is_not_in_their_names():
    table = serving({"dtype": "bfloat16"}, {"engine": "serial", "dtype": "bfloat16"})
    assert list(flover.of_one_model(table).name) == ["fused", "serial"]


def test_no_two_lines_of_a_panel_look_alike():
    for axes in flover_queue.flover_batch_cost(SHIPPED).figure.axes:
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.lines]
        assert len(looks) == len(set(looks))


def test_every_setting_of_sarathi_has_a_row(tmp_path):
    """As tier full has them: more rows that decode, larger chunks, other models; each drawn and legible."""
    folder = paths.root() / "results/reference/laptop-2core/records/sarathi_prefill"
    (own := tmp_path / "sarathi_prefill").mkdir()
    settings = [{}, {"decodes": 16}, {"chunk": 256}, {"model": "smollm2-135m"}, {"model": "random-1b"}]
    for path in sorted(folder.glob("*-r5-*.json")):  # of the claims' setting alone
        for changed in settings:
            run = json.loads(path.read_text()) | {"series": None}
            if "decodes" not in changed or run["point"]["measures"] == "piggyback":
                run["point"] |= changed
                name = record.name_end("sarathi_prefill", run["point"], run["repeat"])
                (own / f"any-{name}.json").write_text(json.dumps(run))
    for name, rows in (("sarathi_piggyback", 6), ("sarathi_throughput", 5)):
        figure = base.draw(name, tmp_path)
        assert len(figure.axes[-1].get_yticks()) == rows and legible.faults(figure) == []
