"""Serial and static batching under the shared engine."""

import math

import pytest
import torch
from timed_model import Clock

from repro.baselines.batching import DynamicScheduler, StaticScheduler, divergence, lone, serial
from repro.flover.engine import Engine
from repro.flover.request import Generation, Request


def asked(lengths: list[int]) -> list[Request]:
    return [Request(i, (i + 1, i + 2, i + 3), new) for i, new in enumerate(lengths)]


def submit(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.submit(request)


def test_static_waits_for_its_batch_or_for_the_last_request(model):
    engine = Engine(model, StaticScheduler(slots=3), capacity=40)
    submit(engine, asked([4, 4]))
    assert not engine.scheduler.ready
    assert engine.step() == [] and engine.iterations == 0
    engine.scheduler.closed = True
    assert engine.scheduler.ready
    engine.step()
    assert len(engine.scheduler.running) == 2


def test_a_static_batch_is_full_when_nobody_else_may_wait(model):
    engine = Engine(model, StaticScheduler(slots=3, queue_limit=2), capacity=40)
    submit(engine, asked([4, 4]))
    assert engine.scheduler.ready, "else a server would refuse everybody for ever"
    engine.step()
    assert len(engine.scheduler.running) == 2


def test_static_admits_nobody_before_the_batch_has_left(model):
    engine = Engine(model, StaticScheduler(slots=2), capacity=40)
    submit(engine, asked([2, 6, 3, 3]))
    finished = [len(engine.step()) for _ in range(9)]
    assert finished == [
        0,
        0,
        0,
        0,
        0,
        2,
        0,
        0,
        2,
    ]  # prompts and 5 decodes for the longest, then prompts and 2 for the second batch


def test_static_counts_dead_rows_and_keeps_the_tokens(model):
    requests = [Request(0, (7,) * 11, 1), *asked([1, 4, 10])[1:]]
    engine = Engine(model, StaticScheduler(slots=3), capacity=12)  # the dead row of request 0 would outgrow its slot
    submit(engine, requests)
    finished = []
    while engine.scheduler.ready:
        finished += engine.step()
    assert engine.iterations == 9 and engine.rows == 27 and engine.dead_rows == 9 + 6
    assert len({generation.finish_s for generation in finished}) == 1
    assert [g.tokens for g in finished] == [g.tokens for g in lone(model, requests, 12)]
    assert all(g.ttft_s == g.latency_s and g.tpot_s is None for g in finished)  # answers come in one piece


def test_a_window_opens_with_the_first_who_waits_and_closes_early_when_the_batch_is_full():
    scheduler = DynamicScheduler(slots=2, window_s=1.0)
    assert scheduler.next_deadline == math.inf and not scheduler.ready
    scheduler.submit(Request(0, (1,), 4, arrival_s=5.0))
    scheduler.closed = True  # which it does not know
    scheduler.expired(5.9)
    assert not scheduler.ready and scheduler.admit() == [] and scheduler.next_deadline == 6.0
    scheduler.expired(6.0)
    assert scheduler.ready
    scheduler.expired(5.5)
    scheduler.submit(Request(1, (1,), 4, arrival_s=5.5))
    scheduler.submit(Request(2, (1,), 4, arrival_s=5.5))
    assert scheduler.ready and [request.id for request in scheduler.admit()] == [0, 1]
    assert scheduler.next_deadline == 6.5 and not scheduler.ready


def test_dynamic_keeps_the_tokens_and_hands_a_batch_back_together(model):
    requests = [
        Request(n, (n + 1, 3), new, at) for n, (new, at) in enumerate([(4, 0.0), (9, 0.5), (3, 1.2), (5, 60.0)])
    ]
    clock = Clock()
    report = Engine(model, DynamicScheduler(8, window_s=1.0), 40, clock, clock.sleep).serve(requests)
    first, second, third, last = report.generations
    assert first.finish_s == second.finish_s and first.admitted_s == second.admitted_s == 1.0
    assert third.admitted_s == 2.2 and last.admitted_s == last.finish_s == 61.0  # nothing else moves this clock
    assert [g.tokens for g in report.generations] == [g.tokens for g in lone(model, requests, 40)]
    assert all(g.ttft_s == g.latency_s and g.tpot_s is None for g in report.generations)


def test_who_waits_for_a_window_leaves_at_the_deadline(model):
    clock = Clock()
    requests = [Request(0, (1,), 4, 0.0, deadline_s=2.0), Request(1, (1,), 4, 1.0)]
    late, fine = Engine(model, DynamicScheduler(8, window_s=5.0), 40, clock, clock.sleep).serve(requests).generations
    assert (late.finish_reason, late.finish_s) == ("deadline", 2.0) and late.tokens == []
    assert (fine.finish_reason, fine.finish_s) == ("length", 6.0)  # the window is its own then


@pytest.mark.parametrize("window_s", [-1.0, math.inf, math.nan])
def test_a_window_is_checked(window_s):
    with pytest.raises(ValueError, match=f"window_s is {window_s}, must be finite and at least 0"):
        DynamicScheduler(4, window_s=window_s)


def test_serial_runs_one_at_a_time(model):
    engine = Engine(model, serial(), capacity=40)
    submit(engine, asked([4, 3]))
    order = []
    while engine.scheduler.ready:
        order += [generation.request.id for generation in engine.step()]
        assert len(engine.scheduler.running) <= 1
    assert order == [0, 1] and engine.rows == engine.iterations == 5


def test_requests_of_one_moment_are_served_in_their_order(model):
    report = Engine(model, serial(queue_limit=3), capacity=40).serve(asked([2, 3, 2, 3]))
    assert sorted(report.generations, key=lambda g: g.finish_s) == report.generations
    assert [g.request.id for g in report.generations] == [0, 1, 2] and set(report.rejected) == {3}


@pytest.mark.parametrize("limit", ["prefill_tokens", "admit_per_iteration", "token_gap_s"])
def test_a_static_batch_is_whole(limit):
    with pytest.raises(ValueError, match=rf"{limit} is 8[.0]*: a static batch is processed whole, 0 allowed"):
        StaticScheduler(4, **{limit: 8})


def test_lone_is_greedy_decoding_by_whole_prefills(model):
    request = Request(0, (3, 1, 4, 1, 5), 12)
    tokens: list[int] = []
    for _ in range(12):
        context = torch.tensor([*request.prompt, *tokens])
        tokens.append(int(model.prefill(context, model.new_cache(1, 20)).argmax()))
    assert lone(model, [request], 20)[0].tokens == tokens


def test_divergence_is_the_logit_gap_at_the_first_difference(model):
    request = Request(0, (3, 1, 4), 6)
    reference = lone(model, [request], 20)[0]
    assert divergence(model, reference, reference) is None
    assert divergence(model, Generation(request, 0, tokens=reference.tokens[:3]), reference) == math.inf
    wrong = reference.tokens.copy()
    wrong[2] = (wrong[2] + 1) % model.config.vocab
    logits = model.prefill(torch.tensor([*request.prompt, *reference.tokens[:2]]), model.new_cache(1, 20))
    expected = float(logits.max() - logits[wrong[2]])
    assert expected > 0
    assert divergence(model, Generation(request, 0, tokens=wrong), reference) == pytest.approx(expected)
