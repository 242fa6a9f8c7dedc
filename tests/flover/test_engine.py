"""Tokens of a fused decode are those of a lone one, whatever arrives and leaves around it."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.baselines.batching import StaticScheduler, lone, serial
from repro.flover.engine import Engine
from repro.flover.request import QueueFull, Request, RequestError
from repro.flover.scheduler import Scheduler

CAPACITY = 100


def request(number: int, prompt: int, new: int, **options) -> Request:
    tokens = torch.randint(0, 61, (prompt,), generator=torch.Generator().manual_seed(number))
    return Request(number, tuple(tokens.tolist()), new, **options)


def drain(engine: Engine, arrivals: dict[int, list[Request]]) -> dict[int, list[int]]:
    """Submit requests before the given steps and run until all are answered; tokens by request id."""
    answers, step = {}, 0
    while arrivals or engine.scheduler.ready:
        for item in arrivals.pop(step, []):
            engine.submit(item)
        engine.scheduler.closed = not arrivals
        answers |= {generation.request.id: generation.tokens for generation in engine.step()}
        step += 1
    return answers


ASKED = st.tuples(st.integers(0, 15), st.integers(1, 70), st.integers(1, 30))


@settings(max_examples=40, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=10), slots=st.integers(1, 6), admit=st.integers(0, 2))
def test_fused_tokens_equal_lone_tokens(model, asked, slots, admit):
    requests = [request(number, prompt, new) for number, (_, prompt, new) in enumerate(asked)]
    arrivals: dict[int, list[Request]] = {}
    for item, (step, _, _) in zip(requests, asked, strict=True):
        arrivals.setdefault(step, []).append(item)
    engine = Engine(model, Scheduler(slots, admit_per_iteration=admit), CAPACITY)
    answers = drain(engine, arrivals)
    assert answers == {g.request.id: g.tokens for g in lone(model, requests, CAPACITY)}
    assert engine.dead_rows == 0 and engine.rows == sum(len(tokens) - 1 for tokens in answers.values())
    assert not engine.scheduler.running and engine.buffers.low == engine.buffers.high


def test_moves_happen_and_keep_the_tokens(model):
    lengths = [40, 5, 40, 9, 40, 13]
    requests = [request(number, 4, new) for number, new in enumerate(lengths)]
    engine = Engine(model, Scheduler(6), CAPACITY)
    answers = drain(engine, {0: requests})
    assert engine.buffers.slot_moves > 0 and engine.buffers.moved_bytes > 0
    assert answers == {g.request.id: g.tokens for g in lone(model, requests, CAPACITY)}


def test_an_iteration_serves_all_that_run(model):
    engine = Engine(model, Scheduler(4), CAPACITY)
    drain(engine, {0: [request(number, 4, 11) for number in range(4)]})
    assert engine.iterations == 10  # the first of 11 tokens comes from the prefill


def test_stop_token_ends_an_answer(model):
    free = lone(model, [request(1, 5, 20)], CAPACITY)[0].tokens
    stop = free[7]
    stopped = lone(model, [request(1, 5, 20, stop_tokens=frozenset({stop}))], CAPACITY)[0].tokens
    assert stopped == free[: free.index(stop) + 1]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request(9, (1,) * 90, 12), "request 9: needs 101 KV positions, a slot has 100"),
        (Request(9, (1, 61), 5), "request 9: token 61 is outside 0 … 60"),
        (Request(9, (-1,), 5), "request 9: token -1 is outside"),
    ],
)
def test_a_bad_request_does_not_disturb_the_others(model, bad, message):
    good = [request(number, 6, 12) for number in range(3)]
    engine = Engine(model, Scheduler(4), CAPACITY)
    for item in good:
        engine.submit(item)
    engine.step()
    with pytest.raises(RequestError, match=message):
        engine.submit(bad)
    answers = drain(engine, {})
    assert answers == {g.request.id: g.tokens for g in lone(model, good, CAPACITY)}


def test_the_longest_request_that_fits(model):
    assert len(lone(model, [Request(1, (1,) * 90, 11)], CAPACITY)[0].tokens) == 11


def test_full_queue_is_told_and_others_go_on(model):
    engine = Engine(model, Scheduler(1, queue_limit=2), CAPACITY)
    requests = [request(number, 3, 4) for number in range(3)]
    engine.submit(requests[0])
    engine.submit(requests[1])
    with pytest.raises(QueueFull, match="request 2"):
        engine.submit(requests[2])
    assert sorted(drain(engine, {})) == [0, 1]


class Clock:
    """Time passes by 10 ms whenever it is read, and while sleeping."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def served(model, scheduler, requests):
    clock = Clock()
    return Engine(model, scheduler, CAPACITY, clock, clock.sleep).serve(requests)


def test_serve_follows_arrivals_and_reports_rejections(model):
    requests = [request(0, 3, 5, arrival_s=50.0), request(1, 3, 5, arrival_s=0.0), Request(2, (99,), 5, 0.0)]
    report = served(model, Scheduler(4), requests)
    assert [generation.request.id for generation in report.generations] == [0, 1]
    assert list(report.rejected) == [2] and "token 99" in report.rejected[2]
    for g in report.generations:
        assert g.request.arrival_s <= g.admitted_s < g.first_token_s < g.finish_s
    assert report.generations[1].finish_s < 50.0 < report.total_seconds == report.generations[0].finish_s
    assert report.iterations == 8 and report.rows == 8


def test_engines_give_the_same_tokens_and_serial_waits_in_line(model):
    requests = [request(number, 5 + number, 3 + 4 * number, arrival_s=0.1 * number) for number in range(5)]
    reports = [served(model, s, requests) for s in (Scheduler(4), serial(), StaticScheduler(slots=2))]
    tokens = [[generation.tokens for generation in report.generations] for report in reports]
    assert tokens[0] == tokens[1] == tokens[2]
    line = reports[1].generations
    assert all(first.finish_s <= later.admitted_s for first, later in itertools.pairwise(line))


def test_capacity_is_checked_against_the_context(model):
    with pytest.raises(ValueError, match="capacity is 257"):
        Engine(model, Scheduler(1), 257)
