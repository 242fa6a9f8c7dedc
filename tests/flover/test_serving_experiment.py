"""The serving experiment end to end on the real model, with a workload of seconds."""

import pytest

from repro.experiments.flover_serving import EXPERIMENT, ServingPoint, run
from repro.models import checkpoint

METRICS = {"total_seconds", "tokens_per_s", "iterations", "output_tokens", "slot_moves", "moved_bytes"}
METRICS |= {f"{name}_{kind}" for name in ("latency", "ttft") for kind in ("mean", "p50", "p99")}
METRICS |= {"waste_fraction", "tokens_equal_fraction", "single_request_seconds"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fused", "static"])
def test_a_short_run_is_token_exact(engine):
    try:
        checkpoint.smollm2_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    point = ServingPoint(engine=engine, requests=5, batch_size=2, max_slots=3, length_scale=0.1, time_scale=0.02)
    outcome = run(point)
    assert set(outcome.metrics) >= METRICS and EXPERIMENT.check(outcome)
    assert ("tpot_mean" in outcome.metrics) == (engine == "fused")  # static answers come in one piece
    assert outcome.metrics["tokens_equal_or_tied_fraction"].value == 1.0
    assert outcome.metrics["tokens_checked"].value == 5 and len(outcome.series) == 5
    assert outcome.metrics["output_tokens"].value == outcome.series.output_tokens.sum() == 4 + 11 + 6 + 2 + 2
    assert (outcome.metrics["waste_fraction"].value > 0) == (engine == "static")
    assert outcome.conditions["scales"].startswith("Azure 2023 conversations from row 0: gaps x 0.02, lengths x 0.1")
    assert engine in EXPERIMENT.label(point)
