"""The queue model against the engine itself on a model that takes known times; costs from the paper's figures."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_model import Clock, TimedModel

from repro.baselines.batching import DynamicScheduler, StaticScheduler, serial
from repro.flover import paper
from repro.flover.arrivals import RequestShape, poisson_arrivals
from repro.flover.engine import Engine
from repro.flover.queueing import (
    Batches,
    ConcurrentBatches,
    FixedSlots,
    Fused,
    Instances,
    LinearTimes,
    MeasuredTimes,
    QueueRun,
    cost,
)
from repro.flover.queueing.pipeline import Pipeline
from repro.flover.queueing.shared import evenly, share
from repro.flover.queueing.times import pass_s
from repro.flover.report import ServingReport
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler

TICK = 2.0**-10  # all times of the fake model are multiples, so that sums are exact and ties are ties


class DyadicTimes:
    """Times that depend on everything a model may depend on, in whole ticks."""

    floor_s = 17 * TICK

    def decode(self, batch, context):
        return (100 + 7 * batch + np.asarray(context) // 3) * TICK

    def prefill(self, tokens, start=0):
        return (20 + 3 * tokens + start) * TICK


SHAPE = st.tuples(st.integers(0, 2000), st.integers(1, 12), st.integers(1, 20))
SHAPES = st.lists(SHAPE, min_size=1, max_size=9).map(
    lambda drawn: [
        RequestShape(at * TICK, *sizes) for at, (_, *sizes) in zip(np.cumsum([d[0] for d in drawn]), drawn, strict=True)
    ]
)


def served(shapes: list[RequestShape], scheduler: Scheduler, times=None, capacity: int = 40) -> ServingReport:
    """By the real engine, on a clock that only the model and waiting move."""
    clock = Clock()
    requests = [Request(n, (1,) * s.prompt_tokens, s.output_tokens, s.arrival_s) for n, s in enumerate(shapes)]
    model = TimedModel(times or DyadicTimes(), clock)
    engine = Engine(model, scheduler, capacity, clock, clock.sleep)
    model.running = scheduler.running
    return engine.serve(requests)


def assert_same(found: QueueRun, report: ServingReport) -> None:
    generations = report.generations
    assert found.admitted_s.tolist() == [g.admitted_s for g in generations]
    assert found.finish_s.tolist() == [g.finish_s for g in generations]
    assert found.ttft_s.tolist() == [g.ttft_s for g in generations]
    assert found.latency_s.tolist() == [g.latency_s for g in generations]
    assert found.total_seconds == report.total_seconds
    assert (found.iterations, found.rows, found.dead_rows) == (report.iterations, report.rows, report.dead_rows)


@settings(max_examples=75, deadline=None)
@given(SHAPES, st.integers(1, 9), st.integers(0, 3), st.integers(0, 14))
def test_fused_is_what_the_engine_does(shapes, slots, admit, chunk):
    report = served(shapes, Scheduler(slots, admit_per_iteration=admit, prefill_tokens=chunk, token_gap_s=0))
    assert_same(Fused(slots, admit, chunk).run(shapes, DyadicTimes()), report)


LONG = st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(LONG, st.integers(1, 9), st.sampled_from([0, 40]), st.integers(1, 2000))
def test_fused_with_a_bound_on_gaps_is_what_the_engine_does(drawn, slots, chunk, gap):
    arrivals = np.cumsum([gap for gap, *_ in drawn]) * TICK
    shapes = [RequestShape(float(at), *sizes) for at, (_, *sizes) in zip(arrivals, drawn, strict=True)]
    gap_s = gap * TICK
    report = served(shapes, Scheduler(slots, prefill_tokens=chunk, token_gap_s=gap_s), capacity=320)
    assert_same(Fused(slots, 0, chunk, token_gap_s=gap_s).run(shapes, DyadicTimes()), report)


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_serial_is_what_the_engine_does(shapes):
    found = Fused(slots=1).run(shapes, DyadicTimes())
    assert_same(found, served(shapes, serial()))
    finish = 0.0  # and what one would do by hand
    for shape, ends in zip(shapes, found.finish_s, strict=True):
        decoded = DyadicTimes().decode(1, shape.prompt_tokens + np.arange(shape.output_tokens - 1)).sum()
        finish = max(finish, shape.arrival_s) + DyadicTimes().prefill(shape.prompt_tokens) + decoded
        assert ends == finish


@settings(max_examples=50, deadline=None)
@given(SHAPES, st.integers(1, 9), st.sampled_from([32, 40]))
def test_static_batches_are_what_the_engine_does(shapes, slots, capacity):
    report = served(shapes, StaticScheduler(slots), capacity=capacity)
    assert_same(Batches(slots, capacity=capacity).run(shapes, DyadicTimes()), report)


@settings(max_examples=75, deadline=None)
@given(SHAPES, st.integers(1, 9), st.integers(0, 3000))
def test_dynamic_batches_are_what_the_engine_does(shapes, slots, window):
    report = served(shapes, DynamicScheduler(slots, window_s=window * TICK))
    assert_same(Batches(slots, window * TICK, 40).run(shapes, DyadicTimes()), report)


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(1, 5), st.integers(0, 1))
def test_times_that_no_number_holds_exactly_end_alike_too(shapes, slots, admit):
    """But for an arrival that rounding puts before or behind a boundary, which π avoids here."""
    shapes = [RequestShape(s.arrival_s * np.pi, s.prompt_tokens, s.output_tokens) for s in shapes]
    times = LinearTimes(0.1, 0.3, 0.007)
    report = served(shapes, Scheduler(slots, admit_per_iteration=admit, token_gap_s=0), times)
    found = Fused(slots, admit).run(shapes, times)
    np.testing.assert_allclose(found.finish_s, [g.finish_s for g in report.generations], rtol=1e-12)
    assert found.iterations == report.iterations


def test_prompts_apart_delay_nobody():
    """Two prompts of 4 s are done at 4 and 8; the second decodes from the boundary after 8 on. Inside, the first would
    wait for both."""
    times = LinearTimes(1.0, 0.0, 1.0)
    shapes = [RequestShape(0.0, 4, 8), RequestShape(0.0, 4, 3)]
    apart = Fused(prefill_apart=True).run(shapes, times)
    assert apart.first_token_s.tolist() == [4, 8] and apart.finish_s.tolist() == [11, 10]
    assert Fused().run(shapes, times).finish_s.tolist() == [15, 10]
    one = Fused(slots=1, prefill_apart=True).run(shapes, times)  # a slot is taken for decoding only
    assert one.admitted_s.tolist() == [4, 11] and one.finish_s.tolist() == [11, 13]


def test_dead_rows_by_hand():
    """Three come at 0, 1 and 2 s; a row costs half an iteration. The second leaves first, and stays a row."""
    times = LinearTimes(1.0, 0.5)
    shapes = [RequestShape(at, 1, tokens + 1) for at, tokens in ((0.0, 6), (1.0, 2), (2.0, 4))]
    found = FixedSlots().run(shapes, times)
    # 1 row until 1, 2 until 2.5, 3 until 4.5: the second is done. Its slot is a row until the others are, which both
    # have three iterations left: at 10.5.
    assert found.finish_s.tolist() == [10.5, 4.5, 10.5]
    assert (found.iterations, found.rows, found.dead_rows) == (6, 15, 3)
    closed = Fused(admit_per_iteration=1, prefill_apart=True).run(shapes, times)
    assert closed.finish_s.tolist() == [9.0, 4.5, 9.0] and closed.rows == 12


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_without_holes_nothing_need_be_reordered(shapes):
    """Who came first leaves first where answers are equal, so no slot dies."""
    shapes = [RequestShape(shape.arrival_s, 1, 9) for shape in shapes]
    times = LinearTimes(TICK * 100, 0.25)
    found, closed = (policy.run(shapes, times) for policy in (FixedSlots(), cost.AUTHORS))
    assert found.dead_rows == 0 and found.iterations == closed.iterations
    np.testing.assert_allclose(found.finish_s, closed.finish_s)


@settings(max_examples=30, deadline=None)
@given(SHAPES)
def test_free_rows_make_reordering_worth_nothing(shapes):
    shapes = [replace(shape, output_tokens=max(shape.output_tokens, 2)) for shape in shapes]  # 1: done with its prompt
    times = LinearTimes(TICK * 100)
    found, closed = (policy.run(shapes, times) for policy in (FixedSlots(), cost.AUTHORS))
    np.testing.assert_allclose(found.finish_s, closed.finish_s)
    assert found.rows - found.dead_rows == closed.rows == sum(shape.output_tokens - 1 for shape in shapes)


def test_windows_by_hand():
    times = LinearTimes(1.0, 0.5)  # prompts are free; 2 rows take 1.5 s, 3 take 2
    shapes = [RequestShape(at, 1, 5) for at in (0.0, 1.0, 2.5, 3.0)]
    one_by_one = Batches(window_s=2.0).run(shapes, times)
    # 0 and 1 run from 2 to 8; the window of 2.5 closed at 4.5, so the others run from 8 to 14.
    assert one_by_one.finish_s.tolist() == [8, 8, 14, 14] and one_by_one.iterations == 8
    beside = ConcurrentBatches(2.0).run(shapes, times)
    # 2.5 s alone, then both at half speed: 3.5 s left of the first at 4.5, so until 11.5; the other has 2.5 left.
    assert beside.admitted_s.tolist() == [2, 2, 4.5, 4.5]
    assert beside.finish_s.tolist() == [11.5, 11.5, 14, 14]
    full = ConcurrentBatches(2.0, slots=2).run(shapes, times)
    assert full.admitted_s.tolist() == [1, 1, 3, 3]  # who is full does not wait


def test_instances_by_hand():
    times = LinearTimes(1.0, prefill_s_per_token=2.0)
    shapes = [RequestShape(0.0, 1, 3), RequestShape(2.0, 1, 3), RequestShape(20.0, 1, 1)]  # 4, 4 and 2 s alone
    found = Instances().run(shapes, times)
    # Alone until 2, then both at half speed: the first has 2 left, done at 6; the other 2 left alone, done at 8.
    assert found.finish_s.tolist() == [6, 8, 22] and found.first_token_s.tolist() == [2, 6, 22]
    assert Instances(1).run(shapes, times).finish_s.tolist() == [4, 8, 22]
    free = Instances(slowdown=lambda running: 1.0).run(shapes, times)
    assert free.finish_s.tolist() == [4, 6, 22] and free.first_token_s.tolist() == [2, 4, 22]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=7),
    st.integers(0, 4),
    st.sampled_from([evenly, lambda k: 1.0 + 0.75 * (k - 1)]),
)
def test_sharing_equals_stepping_through_time(tasks, limit, slowdown):
    """In small steps, each task that runs gains a step over the slow-down."""
    starts = np.cumsum([gap for gap, _ in tasks]).tolist()
    found, step = share(starts, [work for _, work in tasks], slowdown, limit), 0.02
    left, waiting, running, ends = [float(work) for _, work in tasks], list(range(len(tasks))), [], {}
    now = 0.0
    while len(ends) < len(tasks):
        while waiting and starts[waiting[0]] <= now and (not limit or len(running) < limit):
            running.append(waiting.pop(0))
        gain = step / slowdown(len(running)) if running else 0.0
        now += step
        for task in running.copy():
            left[task] -= gain
            if left[task] <= 1e-9:
                ends[task] = now
                running.remove(task)
    np.testing.assert_allclose(found.ends, [ends[task] for task in range(len(tasks))], atol=20 * step)
    np.testing.assert_allclose(found.when(np.array([work for _, work in tasks], float)), found.ends)


def test_measured_times_are_linear_between_the_points_and_refuse_what_was_not_measured():
    grid = np.array([[1.0, 3.0], [2.0, 6.0]])
    times = MeasuredTimes(np.array([1, 3]), np.array([10, 20]), grid, np.array([2, 6]), np.array([0]), grid[:, :1])
    np.testing.assert_allclose(times.decode(1, np.array([5, 10, 15, 20])), [1, 1, 2, 3])
    np.testing.assert_allclose(times.decode(2, np.array([10, 15])), [1.5, 3])
    assert [times.prefill(tokens) for tokens in (1, 2, 4, 6)] == [1, 1, 1.5, 2]
    for call in (lambda: times.decode(4, np.array([10])), lambda: times.decode(1, np.array([10, 21]))):
        with pytest.raises(ValueError, match=r"(batch is 4|context is 21), but was measured up to (3|20) only"):
            call()
    with pytest.raises(ValueError, match="batch is 0, must be at least 1"):
        times.decode(0, np.array([10]))
    with pytest.raises(ValueError, match="start is 1, but was measured up to 0 only"):
        times.prefill(2, 1)
    with pytest.raises(ValueError, match="batches begins with 2, must begin with 1"):
        MeasuredTimes(np.array([2, 3]), *[getattr(times, name) for name in list(vars(times))[1:6]])


def test_a_lone_request_takes_its_own_time():
    found = Fused().run([RequestShape(0.0, 1, 513)], LinearTimes(5.6 / 512))
    assert found.total_seconds == pytest.approx(5.6)
    assert found.iterations == 512 and found.overlap_fraction == 1.0
    assert Fused().run([RequestShape(0.0, 5, 1)], LinearTimes(1.0)).overlap_fraction == 0.0  # its prompt gives all


def test_poisson_gaps_have_the_mean_and_start_at_zero():
    arrivals = poisson_arrivals(20_000, 0.5, seed=3)
    assert arrivals[0] == 0 and np.all(np.diff(arrivals) >= 0)
    assert np.diff(arrivals).mean() == pytest.approx(0.5, rel=0.03)
    assert np.diff(arrivals).std() == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    ("model", "costs"),
    [
        ("gpt-j-6b", (0.0056, 0.0050, 0.0052)),
        ("llama-13b", (0.0032, 0.0037, 0.0034)),
        ("llama-33b", (0.0079, 0.0058, 0.0046)),
        ("llama-65b", (0.0015, 0.0044, 0.0076)),
    ],
)
def test_the_cost_of_a_request_is_read_off_latencies(model, costs):
    """At 8, 16 and 32 requests of Fig. 4(c). The model gives the printed ratio back, and more cost is more latency."""
    found = [cost.batch_cost(model, requests) for requests in (8, 16, 32)]
    assert found == pytest.approx(costs, abs=1e-4)
    ratio = paper.printed("FL-F4c", paper.MODELS[model].name)[32]
    assert cost.latency_ratio(model, 32, found[-1]) == pytest.approx(ratio, abs=1e-4)
    assert cost.latency_ratio(model, 32, found[-1] + 0.002) > ratio + 0.005
    with pytest.raises(ValueError, match="requests is 12, allowed: 8, 16, 32"):
        cost.batch_cost(model, 12)


def test_without_a_cost_all_are_done_with_the_last_arrival_and_one_alone():
    for name, model in paper.MODELS.items():
        total = cost.served(name, 32, 0.0).total_seconds
        boundary = model.single_request_s / paper.TOKENS  # the last to come waits for one at most
        assert total == pytest.approx(31 * paper.INTERVAL_S + model.single_request_s + boundary / 2, abs=boundary)


def test_printed_numbers_are_found_by_their_label():
    assert paper.printed("FL-F4a", "LLaMA-33B, Flover") == {1: 13.6, 2: 14.1, 4: 15.6, 8: 17.7, 16: 21.9, 32: 30.3}
    assert paper.printed("FL-PROG", "fused, all done") == {None: 26.5}
    assert paper.v1_single_request_s() == pytest.approx((5.57 + 5.54 + 5.54) / 3)
    assert paper.v1_instance_pace_s() == pytest.approx((34.36 - 5.99) / 7)
    several = paper.v1_seconds("FasterTransformer", 500, rows=4)
    assert paper.v1_instance_pace_s(rows=4) == (several[8] - several[1]) / 7 != paper.v1_instance_pace_s()
    assert paper.v1_single_request_s(rows=4) > paper.v1_single_request_s()
    with pytest.raises(ValueError, match=r"found no 'GPT-9' of FL-F4c; known: GPT-J 6B, LLaMA-13B, LLaMA-33B"):
        paper.printed("FL-F4c", "GPT-9")


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LinearTimes(0.0), "iteration_s is 0.0, must be above 0"),
        (lambda: LinearTimes(1.0, -1.0), "batch_cost is -1.0, must be at least 0"),
        (lambda: Fused(slots=-1), "slots is -1, must be at least 0"),
        (lambda: Fused(prefill_tokens=8, prefill_apart=True), "prefill_tokens is 8: with prefill_apart only 0"),
        (lambda: Fused(token_gap_s=0.5, prefill_apart=True), "token_gap_s is 0.5: with prefill_apart only 0"),
        (lambda: Batches(window_s=-1.0), "window_s is -1.0, must be at least 0"),
        (lambda: ConcurrentBatches(1.0, slots=-2), "slots is -2"),
        (lambda: Instances(-1), "count is -1"),
        (lambda: Fused(prefill_tokens=2.5), "prefill_tokens is 2.5, must be a whole number"),
        (lambda: Batches(2.0), "slots is 2.0, must be a whole number"),
        (lambda: Pipeline(2, 4, 0.5), "chunk is 0.5, must be a whole number"),
    ],
)
def test_parameters_are_checked(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("policy", [Fused(), Batches(2), ConcurrentBatches(1.0), Instances()])
def test_requests_are_checked(policy):
    for arrivals, words in (
        ([], "no request"),
        ([2.0, 1.0], "request 1: arrival_s is 1.0, must be at least 2"),
        ([-1.0], "arrival_s is -1"),
    ):
        with pytest.raises(ValueError, match=words):
            policy.run([RequestShape(at, 1, 2) for at in arrivals], LinearTimes(1.0))
    with pytest.raises(ValueError, match="request 0: prompt_tokens is 1 and output_tokens 0"):
        policy.run([RequestShape(0.0, 1, 0)], LinearTimes(1.0))


class WholeTimes(DyadicTimes):
    """Says itself what a pass of several parts takes."""

    def mixed(self, batch, context, chunks):
        return 1000.0 + batch + 10 * sum(tokens for tokens, _ in chunks)


def test_times_of_whole_passes_are_not_put_together_from_parts():
    assert pass_s(WholeTimes(), 2, 9, [(3, 0), (4, 5)]) == 1000.0 + 2 + 10 * 7
    parts = DyadicTimes().decode(2, 9) + DyadicTimes().prefill(3) + DyadicTimes().prefill(4, 5)
    assert pass_s(DyadicTimes(), 2, 9, [(3, 0), (4, 5)]) == parts - 2 * DyadicTimes.floor_s
