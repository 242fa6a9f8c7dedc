"""Tokens of a fused decode are those of a lone one, whatever arrives and leaves around it."""

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timed_model import Clock as ModelClock
from timed_model import TimedModel

from repro.baselines.batching import StaticScheduler, lone, serial
from repro.flover.buffers import LAYOUTS
from repro.flover.buffers.baseline_layouts import FixedBuffers
from repro.flover.buffers.paged import PagedBuffers
from repro.flover.engine import Engine
from repro.flover.queueing import LinearTimes
from repro.flover.request import Request, RequestError
from repro.flover.sampling import Sampling
from repro.flover.scheduler import Scheduler
from repro.models.gpt_j_neox import GPTJ, GPTJConfig, GPTNeoX, GPTNeoXConfig
from repro.models.llama import Llama, LlamaConfig

CAPACITY = 100


def request(number: int, prompt: int, new: int, **options) -> Request:
    tokens = torch.randint(0, 61, (prompt,), generator=torch.Generator().manual_seed(number))
    return Request(number, tuple(tokens.tolist()), new, **options)


def drain(engine: Engine, arrivals: dict[int, list[Request]]) -> dict[int, list[int]]:
    """Submit requests before the given steps and run until all are answered; tokens by request id."""
    answers, step = {}, 0
    while arrivals or engine.ready:
        for item in arrivals.pop(step, []):
            engine.submit(item)
        engine.scheduler.closed = not arrivals
        answers |= {generation.request.id: generation.tokens for generation in engine.step()}
        step += 1
    return answers


WAYS = st.sampled_from(
    [Sampling(), Sampling(0.8, seed=1), Sampling(1.5, top_k=9, seed=2), Sampling(1.0, top_p=0.7, seed=3)]
)
ASKED = st.tuples(st.integers(0, 15), st.integers(1, 70), st.integers(1, 30), WAYS)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
@settings(max_examples=12, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=10), slots=st.integers(1, 6), admit=st.integers(0, 2))
def test_fused_tokens_equal_lone_tokens(layout, model, asked, slots, admit):
    requests = [request(n, prompt, new, sampling=sampling) for n, (_, prompt, new, sampling) in enumerate(asked)]
    arrivals: dict[int, list[Request]] = {}
    for item, (step, *_) in zip(requests, asked, strict=True):
        arrivals.setdefault(step, []).append(item)
    engine = Engine(model, Scheduler(slots, admit_per_iteration=admit), CAPACITY, layout=layout)
    answers = drain(engine, arrivals)
    assert answers == {g.request.id: g.tokens for g in lone(model, requests, CAPACITY)}
    decoded = engine.rows - engine.dead_rows
    assert decoded == sum(len(tokens) - 1 for tokens in answers.values())
    assert layout is FixedBuffers or engine.dead_rows == 0
    assert not engine.scheduler.running and engine.buffers.window == slice(0, 0)


@functools.cache
def other_model(kind: str, kernels: str):
    sizes = {"layers": 2, "width": 40, "heads": 4, "ffn": 100, "vocab": 61, "context": 256}
    if kind == "Qwen":
        config = LlamaConfig(**sizes, kv_heads=2, head_dim=14, qkv_bias=True, head_norms=True)
        return Llama.random(config, seed=7, kernels=kernels)
    sizes["rotary_dim"] = 6
    if kind == "GPT-J":
        return GPTJ.random(GPTJConfig(**sizes), seed=7, kernels=kernels)
    return GPTNeoX.random(GPTNeoXConfig(**sizes, parallel_residual=kind == "GPT-NeoX"), seed=7, kernels=kernels)


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("kind", ["GPT-J", "GPT-NeoX", "sequential GPT-NeoX", "Qwen"])
@settings(max_examples=5, deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=8),
    slots=st.integers(1, 6),
    layout=st.sampled_from(list(LAYOUTS.values())),
)
def test_fused_tokens_equal_lone_tokens_of_other_architectures(kind, kernels, asked, slots, layout):
    model = other_model(kind, kernels)
    requests = [request(n, prompt, new, sampling=sampling) for n, (_, prompt, new, sampling) in enumerate(asked)]
    arrivals: dict[int, list[Request]] = {}
    for item, (step, *_) in zip(requests, asked, strict=True):
        arrivals.setdefault(step, []).append(item)
    answers = drain(Engine(model, Scheduler(slots), CAPACITY, layout=layout), arrivals)
    assert answers == {g.request.id: g.tokens for g in lone(model, requests, CAPACITY)}


@settings(max_examples=12, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=8), chunk=st.integers(1, 40), slots=st.integers(1, 5))
def test_chunked_prefill_gives_the_same_tokens_and_stalls_nobody(model, asked, chunk, slots):
    requests = [request(n, prompt, new, sampling=sampling) for n, (_, prompt, new, sampling) in enumerate(asked)]
    engine = Engine(model, Scheduler(slots, prefill_tokens=chunk), CAPACITY)
    for item in requests:
        engine.submit(item)
    answers, stalled = {}, 0
    while engine.ready:
        before = {g.request.id: len(g.tokens) for g in engine.scheduler.running.values() if g.decoding}
        spent = sum(g.prefilled for g in engine.scheduler.running.values())
        answers |= {g.request.id: g for g in engine.step()}
        running = list(engine.scheduler.running.values())
        stalled += sum(len(g.tokens) == before.get(g.request.id) for g in running)
        assert sum(g.prefilled for g in running) - spent <= chunk
        for slot, g in engine.scheduler.running.items():
            assert g.tokens or int(engine.buffers.lengths[slot]) == g.prefilled
        assert sum(not g.tokens for g in running) <= 1  # a slot is taken when its prompt's turn has come
    assert stalled == 0
    for reference in lone(model, requests, CAPACITY):
        assert answers[reference.request.id].tokens == reference.tokens


class Unsteady:
    """A clock on which passes take anything, so that budgets become anything."""

    def __init__(self, seed: int) -> None:
        self.now, self.draw = 0.0, random.Random(seed)

    def __call__(self) -> float:
        self.now += self.draw.expovariate(20)
        return self.now


EVENT = st.tuples(st.integers(0, 25), st.integers(0, 9))  # at that step, cancel that request


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
@settings(max_examples=10, deadline=None)
@given(
    asked=st.lists(ASKED, min_size=1, max_size=10),
    slots=st.integers(1, 6),
    gap=st.sampled_from([0.0, 1e-9, 0.05, 0.2]),
    seed=st.integers(0, 99),
    cancelled=st.lists(EVENT, max_size=4),
)
def test_any_budget_gives_the_tokens_of_lone_runs(layout, model, asked, slots, gap, seed, cancelled):
    """Without a gap: the policy without chunks. Who is cancelled has the beginning of those tokens."""
    requests = [request(n, prompt, new, sampling=sampling) for n, (_, prompt, new, sampling) in enumerate(asked)]
    engine = Engine(model, Scheduler(slots, token_gap_s=gap), CAPACITY, Unsteady(seed), layout=layout)
    answers = {}
    for step in itertools.count():
        for item, (arrival, *_) in zip(requests, asked, strict=True):
            if arrival == step:
                engine.submit(item)
        for at, number in cancelled:
            if at == step:
                engine.cancel(number)
        if step > 15 and not engine.ready:
            break
        decoding = {g.request.id: len(g.tokens) for g in engine.scheduler.running.values() if g.decoding}
        answers |= {g.request.id: g for g in engine.step()}
        running = {g.request.id: g for g in engine.scheduler.running.values()} | answers
        assert all(len(running[n].tokens) == before + 1 for n, before in decoding.items()), "decoding was held up"
    for reference in lone(model, requests, CAPACITY):
        found = answers[reference.request.id]
        whole = reference.tokens if found.finish_reason == "length" else reference.tokens[: len(found.tokens)]
        assert found.tokens == whole
        assert found.finish_reason == "length" or (found.finish_reason == "cancelled" and cancelled)


def timed(requests, scheduler, times):
    """Served on a clock that only the model moves."""
    clock = ModelClock()
    timed_model = TimedModel(times, clock)
    engine = Engine(timed_model, scheduler, 2000, clock, clock.sleep)
    timed_model.running = scheduler.running
    return engine.serve(requests)


MANY = st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 900), st.integers(1, 60)), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(asked=MANY, slots=st.integers(1, 8))
def test_nobody_waits_longer_for_a_next_token_than_was_said(asked, slots):
    """A prompt token takes 1 ms, a row 0.5 and a pass 20; so 64 tokens are in time before anything is measured."""
    requests = [Request(n, (1,) * prompt, new, at / 1000) for n, (at, prompt, new) in enumerate(asked)]
    requests.sort(key=lambda request: request.arrival_s)
    times = LinearTimes(0.0205, 0.5 / 20.5, 0.001)
    found = timed(requests, Scheduler(slots, token_gap_s=0.2), times).generations
    assert max(g.longest_gap_s for g in found) <= 0.2
    by_arrival = sorted(found, key=lambda g: (g.request.arrival_s, g.request.id))
    first = [g.first_token_s for g in by_arrival]
    assert first == sorted(first)  # first come, first served


def test_a_first_token_comes_with_its_own_prompt():
    """Eight prompts of 300 tokens at once: without a bound the first token of all is there after the last prompt."""
    requests = [Request(n, (1,) * 300, 50, 0.0) for n in range(8)]
    times = LinearTimes(0.0205, 0.5 / 20.5, 0.001)
    policies = (Scheduler(8, token_gap_s=0.2), Scheduler(8, token_gap_s=0))
    chunked, whole = (timed(requests, scheduler, times) for scheduler in policies)
    assert [g.ttft_s for g in whole.generations] == pytest.approx([2.4] * 8)
    ttft = [g.ttft_s for g in chunked.generations]
    assert ttft[0] == pytest.approx(0.3) and ttft == sorted(ttft)
    assert sum(ttft) < 0.7 * sum(g.ttft_s for g in whole.generations)


def test_a_paged_pool_serves_what_fits_and_refuses_what_never_can(model):
    layout = functools.partial(PagedBuffers, blocks=6, block=8)
    requests = [request(number, 10, 15) for number in range(6)]  # 24 positions: 3 blocks
    engine = Engine(model, Scheduler(6), CAPACITY, layout=layout)
    for item in requests:
        engine.submit(item)
    engine.step()
    assert len(engine.scheduler.running) == 2
    with pytest.raises(RequestError, match="request 9: needs 49 KV positions, the pool has 48"):
        engine.submit(request(9, 40, 10))
    assert drain(engine, {}) == {g.request.id: g.tokens for g in lone(model, requests, CAPACITY)}


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_an_answer_of_one_token_may_fill_its_slot(model, scheduler, layout):
    """Its row has no position left to write and must not write into another's while it stays as a dead row."""
    layout = functools.partial(PagedBuffers, block=8) if layout is PagedBuffers else layout
    requests = [request(0, 4, 10), request(1, 32, 1), request(2, 4, 10)]
    report = Engine(model, scheduler(3), 32, layout=layout).serve(requests)
    assert [g.tokens for g in report.generations] == [g.tokens for g in lone(model, requests, 32)]


def test_a_request_without_arrival_arrives_when_it_is_submitted(model):
    clock = Clock()
    engine = Engine(model, Scheduler(2), CAPACITY, clock, clock.sleep)
    clock.now += 50.0
    engine.submit(request(0, 3, 4, deadline_s=1.0))
    while not (found := engine.step()):
        pass
    assert found[0].finish_reason == "length" and 0 < found[0].ttft_s <= found[0].latency_s < 1.0


def test_who_waits_for_a_batch_leaves_at_its_deadline(model):
    requests = [request(0, 3, 4, arrival_s=0.0, deadline_s=0.2), request(1, 3, 4, arrival_s=5.0)]
    late, fine = served(model, StaticScheduler(2), requests).generations
    assert late.finish_reason == "deadline" and late.finish_s < 0.5 and late.ttft_s is None
    assert fine.finish_reason == "length"


def test_a_limit_on_kv_positions_holds_at_every_moment(model):
    with pytest.raises(RequestError, match="needs 41 KV positions, kv_tokens has 30"):
        Engine(model, Scheduler(6, kv_tokens=30), CAPACITY).submit(request(9, 40, 2))
    requests = [request(number, 5 + number, 6) for number in range(6)]
    engine = Engine(model, Scheduler(6, kv_tokens=30), CAPACITY)
    for item in requests:
        engine.submit(item)
    answers = {}
    while engine.ready:
        answers |= {g.request.id: g.tokens for g in engine.step()}
        assert sum(g.request.kv_tokens for g in engine.scheduler.running.values()) <= 30
    assert answers == {g.request.id: g.tokens for g in lone(model, requests, CAPACITY)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=str)
def test_cancelled_requests_disturb_nobody(layout, model):
    """One that waits, one in its prompt, one that decodes; their neighbours' tokens are those of lone runs."""
    requests = [request(number, 30, 12) for number in range(6)]
    engine = Engine(model, Scheduler(4, prefill_tokens=20), CAPACITY, layout=layout)
    for item in requests:
        engine.submit(item)
    ended = [g for _ in range(5) for g in engine.step()]
    running = {g.request.id: g for g in engine.scheduler.running.values()}
    assert running[1].decoding and not running[3].tokens and running[3].prefilled > 0
    assert all(engine.cancel(number) for number in (1, 3, 5)) and not engine.cancel(1) and not engine.cancel(77)
    while engine.ready:
        ended += engine.step()
    found = {g.request.id: g for g in ended}
    assert {n: g.finish_reason for n, g in found.items()} == dict.fromkeys((0, 2, 4), "length") | dict.fromkeys(
        (1, 3, 5), "cancelled"
    )
    for reference in lone(model, requests, CAPACITY):
        tokens = found[reference.request.id].tokens
        assert tokens == reference.tokens[: len(tokens)]
    assert found[5].slot == -1 and 0 < len(found[1].tokens) < 12 and not engine.cancel(0)


def test_deadlines_end_who_waits_and_who_runs(model):
    requests = [
        request(0, 3, 60, deadline_s=0.5),
        request(1, 3, 4),
        request(2, 3, 4, deadline_s=0.2),  # waits behind request 0
    ]
    report = served(model, Scheduler(1), requests)
    late, fine, never = report.generations
    assert (late.finish_reason, fine.finish_reason, never.finish_reason) == ("deadline", "length", "deadline")
    assert 0 < len(late.tokens) < 60 and late.latency_s >= 0.5 and never.tokens == []
    assert [late.tokens, fine.tokens] == [
        g.tokens[: len(s.tokens)] for g, s in zip(lone(model, requests[:2], CAPACITY), (late, fine), strict=True)
    ]


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


def test_the_longest_request_that_fits(model):
    assert len(lone(model, [Request(1, (1,) * 90, 11)], CAPACITY)[0].tokens) == 11


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
