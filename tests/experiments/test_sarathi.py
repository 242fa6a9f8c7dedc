"""SARATHI's experiments, with workloads of a second."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from repro import experiments
from repro.experiments.sarathi_bubbles import CHOICES, BubblesMetrics, BubblesPoint
from repro.experiments.sarathi_bubbles import run as bubbles
from repro.experiments.sarathi_prefill import POLICIES, SWEEPS, PrefillPoint, piggyback, throughput
from repro.flover.arrivals import RequestShape
from repro.flover.queueing import Fused, LinearTimes
from repro.flover.queueing.pipeline import Pipeline


def test_passes_are_those_that_they_are_said_to_be(model):
    """Rows that decode go on in every pass but a lone chunk's; a chunk is a whole prompt, and leaves with it."""
    point = PrefillPoint(chunk=20, prompt_tokens=12, decodes=3)
    beside, alone = piggyback.Passes(point, model, 3), piggyback.Passes(point, model, 0)
    answers = lambda: [len(g.tokens) for g in beside.engine.scheduler.running.values()]  # noqa: E731
    assert answers() == [1, 1, 1]
    assert beside.decode() > 0 and answers() == [2, 2, 2]
    assert beside.chunk() > 0 and answers() == [3, 3, 3]
    assert (beside.engine.iterations, beside.engine.rows) == (2, 6)
    assert alone.chunk() > 0 and alone.engine.iterations == 0 and not alone.engine.ready


def test_costs_of_a_token_are_read_off_three_passes(model, monkeypatch):
    monkeypatch.setattr(piggyback, "TURNS", 3)
    monkeypatch.setattr(piggyback.Passes, "decode", lambda self: 0.008)
    monkeypatch.setattr(piggyback.Passes, "chunk", lambda self: 0.054 if self.engine.scheduler.slots > 1 else 0.05)
    found, table = piggyback.measured(PrefillPoint(chunk=20, prompt_tokens=12, decodes=4, rounds=2), model)
    assert found.token_alone_s == pytest.approx(0.002) and found.token_beside_s == pytest.approx(0.001)
    assert len(table) == 2 * SWEEPS * 3 and list(table) == ["decode", "chunk", "mixed"]


def test_every_sweep_has_rows_of_as_many_stored_tokens(model, monkeypatch):
    """And takes no more positions than one: the second would begin where the first ended."""
    stored, decode = [], piggyback.Passes.decode

    def noted(self):
        stored.append(sum(len(g.request.prompt) + len(g.tokens) for g in self.engine.running))
        return decode(self)

    monkeypatch.setattr(piggyback, "TURNS", 2)
    monkeypatch.setattr(piggyback.Passes, "decode", noted)
    piggyback.measured(PrefillPoint(chunk=20, prompt_tokens=12, decodes=3), model)
    assert len(stored) == SWEEPS * 3 * (1 + 2) and stored == stored[:9] * SWEEPS


def test_every_policy_serves_the_same_requests(model):
    fields = {"chunk": 8, "prompt_tokens": 20, "output_tokens": 5, "requests": 6, "slots": 3}
    point = PrefillPoint(measures="throughput", rounds=2, **fields)
    found, table = throughput.measured(point, model)
    assert list(table.policy) == [*POLICIES, *POLICIES[::-1]] * 2 * SWEEPS and (table.seconds > 0).all()
    assert list(table["round"]) == [0] * 8 * SWEEPS + [1] * 8 * SWEEPS
    assert list(table["sweep"]) == [sweep for sweep in range(SWEEPS) for _ in range(8)] * 2
    values = found.model_dump()
    assert all(math.isfinite(values[f"{policy}_error_seconds"]) for policy in POLICIES)
    assert values["request_level_gap_longest"] is None and values["chunked_gap_longest"] > 0
    assert point.label == "throughput-random-40m-p20-d5-c8-bfloat16"


def test_no_policy_gains_by_its_place_where_the_machine_grows_slower(model, monkeypatch):
    calls = iter(range(100))
    monkeypatch.setattr(
        throughput, "served", lambda *args: {"seconds": 10.0 + next(calls), "ttft_mean": 1.0, "gap_longest": 0.0}
    )
    fields = {"chunk": 8, "prompt_tokens": 20, "output_tokens": 5, "requests": 6, "slots": 3}
    found, _ = throughput.measured(PrefillPoint(measures="throughput", **fields), model)
    assert len({getattr(found, f"{policy}_seconds") for policy in POLICIES}) == 1


def test_passes_are_timed_at_both_ends_of_every_sweep(model, monkeypatch):
    order = []
    real, served = throughput.passes, throughput.served
    monkeypatch.setattr(throughput, "passes", lambda *args: order.append("passes") or real(*args))
    monkeypatch.setattr(throughput, "served", lambda *args: order.append(args[2]) or served(*args))
    fields = {"chunk": 8, "prompt_tokens": 20, "output_tokens": 5, "requests": 3, "slots": 3}
    throughput.measured(PrefillPoint(measures="throughput", **fields), model)
    sweep = ["passes", *POLICIES, *POLICIES[::-1], "passes"]
    assert order == [*POLICIES, *sweep * SWEEPS], "after a warm-up"


def test_a_field_of_the_other_measurement_is_refused():
    with pytest.raises(ValidationError, match="decodes is 3: only where piggyback is measured"):
        PrefillPoint(measures="throughput", decodes=3)
    with pytest.raises(ValidationError, match="shortest is 9, longest 8"):
        BubblesPoint(shortest=9, longest=8)


def test_a_pipeline_of_one_stage_has_no_bubbles_and_serves_as_one_machine_does():
    shapes = [RequestShape(0.0, 7, 5), RequestShape(0.0, 30, 9), RequestShape(0.0, 3, 1), RequestShape(0.0, 12, 20)]
    times = LinearTimes(1.0, 0.25, 0.5)
    found, one = Pipeline(1, 4).run(shapes, times), Fused(4).run(shapes, times)
    assert found.total_seconds == one.total_seconds and found.idle_s.tolist() == [0.0]
    assert found.passes == one.iterations + 1  # the first is of prompts alone


def test_passes_that_cost_nothing_lose_no_request():
    """Prompts are free by default: a pass of them alone takes no time, and what they ask for is still decoded."""
    free, shapes = LinearTimes(1.0), [RequestShape(0.0, 8, 10)] * 8
    found = Pipeline(1, 4).run(shapes, free)
    assert found.total_seconds == 18.0 and found.bubble_fraction == 0.0
    assert Pipeline(2, 4).run(shapes, free).total_seconds >= 9.0
    assert Pipeline(1, 4).run([RequestShape(0.0, 8, 1)], free).bubble_fraction == 0.0
    with pytest.raises(ValueError, match="output_tokens 0, must be at least 1"):
        Pipeline(1, 4).run([RequestShape(0.0, 8, 0)], free)


def test_equal_passes_keep_every_stage_busy_and_a_long_one_does_not():
    """Four micro-batches of one request each, prompts of 4 s and three tokens of 4 s: stage by stage without a gap."""
    times = LinearTimes(4.0, 0.0, 1.0)
    even = Pipeline(4, 1).run([RequestShape(0.0, 4, 4)] * 4, times)
    assert even.idle_s.tolist() == [0.0] * 4 and even.passes == 16
    assert even.total_seconds == pytest.approx(3 + 16)  # to fill the other three stages, then a second a pass
    mixed = [RequestShape(0.0, 16 if n % 3 else 1, 4 + n % 5) for n in range(24)]
    whole, chunks = (Pipeline(4, 2, chunk).run(mixed, times) for chunk in (0, 5))
    assert 0 < chunks.bubble_fraction < whole.bubble_fraction < 1
    assert chunks.idle_s.sum() < 0.7 * whole.idle_s.sum()


def test_all_prompts_and_answers_are_worked_off_whatever_the_chunk():
    """With free decoding only prompt tokens take time, and none is processed twice or left out."""

    class Prompts:
        floor_s = 0.0
        tokens = 0

        def decode(self, batch, context):
            return np.full(len(context), 1e-9)

        def prefill(self, tokens, start=0):
            self.tokens += tokens
            return float(tokens)

    shapes = [RequestShape(0.0, 5 + 3 * n, 1 + n) for n in range(9)]
    for chunk in (0, 1, 4, 100):
        times = Prompts()
        Pipeline(3, 2, chunk).run(shapes, times)
        assert times.tokens == sum(shape.prompt_tokens for shape in shapes)


def test_bubbles_at_a_small_size():
    small = {"draws": 3, "requests": 12, "stages": 2, "slots": 2, "shortest": 64, "longest": 256}
    outcome, again = (experiments.get("sarathi_bubbles").run(BubblesPoint(**small)) for _ in range(2))
    found = outcome.metrics
    assert again.metrics == found and again.series.equals(outcome.series)
    assert outcome.evidence == "modelled" and "requests 12; each as often" in outcome.conditions["setting"]
    assert list(outcome.series.varied) == ["prompt_per_output"] * 3 + ["chunk"] * 3 + ["requests"]
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert found.bubble_reduction > 0 and 0 < found.chunked_bubble_fraction < 1


def test_a_pipeline_whose_stages_never_wait_has_no_ratio_to_tell():
    sizes = {"draws": 2, "stages": 2, "requests": 1, "chunk": 8, "longest": 2}
    with pytest.raises(ValueError, match="requests is 1, chunk 8: no stage waits for another"):
        bubbles.run(BubblesPoint(**sizes, shortest=2, prompt_per_output=1))
    with pytest.raises(ValidationError, match="stages"):
        BubblesPoint(stages=1)


def test_every_prompt_has_a_token_however_short():
    sizes = {"draws": 2, "stages": 2, "requests": 9, "chunk": 8, "shortest": 2, "longest": 4, "slots": 2}
    assert bubbles.run(BubblesPoint(**sizes, prompt_per_output=0.1)).metrics.speedup > 0


def test_what_nobody_told_is_drawn_alike_by_the_same_seed():
    drawn, again, other = (bubbles._chosen(BubblesPoint(draws=12, seed=seed)) for seed in (0, 0, 1))
    assert drawn.equals(again) and not drawn.equals(other)
    for name, values in CHOICES.items():
        assert sorted(drawn[name]) == sorted(np.resize(values, 12)), "each as often"
    fixed = bubbles._chosen(BubblesPoint(draws=12, requests=512))
    assert set(fixed.requests) == {512} and fixed.chunk.equals(drawn.chunk), "what is fixed does not move the others"
    assert BubblesPoint().label == "gpt3-8x8-s16" and BubblesPoint(requests=512).label == "gpt3-8x8-s16-n512"


def test_the_band_holds_every_number_of_requests(monkeypatch):
    """In place of the model: the number of requests, and a little more with every draw."""
    names = [name for name in BubblesMetrics.model_fields if f"{name}_low" in BubblesMetrics.model_fields]
    monkeypatch.setattr(bubbles, "_one", lambda point, machine, draw: dict.fromkeys(names, point.requests + draw / 100))
    drawn, few, many = (bubbles.run(BubblesPoint(draws=48, requests=n)) for n in (0, 128, 1024))
    widths = [each.metrics.bubble_reduction_high - each.metrics.bubble_reduction_low for each in (drawn, few, many)]
    assert widths[0] > 1024 - 128 - 1 > 1 > max(widths[1:])
    rows = drawn.series[drawn.series.varied == "requests"]
    assert list(rows.value) == [128, 256, 512, 1024] and list(rows.bubble_reduction // 1) == list(rows.value)
