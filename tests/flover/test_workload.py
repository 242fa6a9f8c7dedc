"""Workloads are what they say; the summary is hand-checked."""

import math

import numpy as np
import pytest

from repro import paths
from repro.flover import workload
from repro.flover.arrivals import RequestShape, fixed_arrivals, poisson_arrivals
from repro.flover.report import ServingReport
from repro.flover.request import Generation, Request


def test_azure_slice_is_scaled_and_cut():
    shapes = workload.azure(paths.data("azure23_conv.csv"), 4, 0, 0.5, 0.25, 100, 20)
    # First rows of the trace: 374,44 at 0 s; 396,109 at 4.314579 s; 879,55; 91,16.
    assert [(s.prompt_tokens, s.output_tokens) for s in shapes] == [(94, 11), (99, 20), (100, 14), (23, 4)]
    assert shapes[0].arrival_s == 0 and shapes[1].arrival_s == pytest.approx(4.314579 / 2)


def test_no_requests_are_no_error():
    assert workload.azure(paths.data("azure23_conv.csv"), 0) == []
    assert workload.prompts_from_text([], [1, 2], 0) == workload.random_prompts([], 9, 0) == []


def test_azure_slice_may_start_later_and_must_fit():
    path = paths.data("azure23_conv.csv")
    whole, part = workload.azure(path, 12), workload.azure(path, 2, start=10)
    assert [s.prompt_tokens for s in part] == [s.prompt_tokens for s in whole[10:]]
    assert part[1].arrival_s == pytest.approx(whole[11].arrival_s - whole[10].arrival_s)
    with pytest.raises(ValueError, match="has 6 requests from row 19360"):
        workload.azure(path, 32, start=19_360)


def test_sharegpt_has_lengths_scaled_and_cut_and_arrivals_of_ours():
    path = paths.data("sharegpt_lengths_llmservingsim.csv")
    shapes = workload.sharegpt(path, [0.0, 0.5, 2.0], 0, 0.1, 110, 60)
    # First rows of the file: 2358,531; 1034,769; 1320,769.
    assert shapes == [RequestShape(0.0, 110, 53), RequestShape(0.5, 103, 60), RequestShape(2.0, 110, 60)]
    assert workload.sharegpt(path, [0.0], start=1) == [RequestShape(0.0, 1034, 769)]
    with pytest.raises(ValueError, match="has 2 requests from row 298, asked for 3"):
        workload.sharegpt(path, [0.0, 1.0, 2.0], start=298)


def test_regular_and_poisson_arrivals():
    assert fixed_arrivals(3, 0.5).tolist() == [0, 0.5, 1.0]
    drawn = [poisson_arrivals(3, 0.5, seed).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] == 0


def test_uniform_lengths_span_the_range():
    shapes = workload.uniform(400, 0.1, 8, 3, 6, seed=1)
    assert {s.output_tokens for s in shapes} == {3, 4, 5, 6} and {s.prompt_tokens for s in shapes} == {8}
    assert shapes[10].arrival_s == pytest.approx(1.0) and shapes != workload.uniform(400, 0.1, 8, 3, 6, seed=2)


def test_prompts_are_passages_as_long_as_asked():
    shapes = [RequestShape(0, n, 1) for n in (3, 5, 1)]
    text = list(range(100, 140))
    prompts = workload.prompts_from_text(shapes, text, seed=0)
    assert [len(p) for p in prompts] == [3, 5, 1]
    assert all(p == tuple(range(p[0], p[0] + len(p))) for p in prompts)
    assert prompts != workload.prompts_from_text(shapes, text, seed=1)
    with pytest.raises(ValueError, match="longest prompt needs 5"):
        workload.prompts_from_text(shapes, text[:4], seed=0)
    random = workload.random_prompts(shapes, 50, seed=0)
    assert [len(p) for p in random] == [3, 5, 1] and max(map(max, random)) < 50


def test_summary_by_hand():
    def generation(number, arrival, first, finish, tokens):
        return Generation(Request(number, (1,), tokens, arrival), 0, arrival, [1] * tokens, first, finish)

    report = ServingReport([generation(0, 0.0, 1.0, 3.0, 5), generation(1, 2.0, 2.5, 4.0, 1)], total_seconds=4.0)
    gone = Generation(Request(2, (1,), 9), -1, 1.0, finish_s=1.0, finish_reason="deadline")
    report.generations.append(gone)  # takes no part in the times
    report.rows, report.dead_rows, report.iterations = 10, 4, 6
    metrics = workload.summary(report)
    assert metrics["tokens_per_s"] == 6 / 4.0 and metrics["output_tokens"] == 6
    assert metrics["latency_mean"] == 2.5 and metrics["ttft_mean"] == 0.75
    assert metrics["tpot_mean"] == metrics["tpot_p99"] == 0.5  # an answer of one token has none
    assert metrics["latency_p99"] == pytest.approx(np.percentile([3.0, 2.0], 99))
    assert metrics["waste_fraction"] == 0.4
    assert not any(math.isnan(value) for value in metrics.values())
