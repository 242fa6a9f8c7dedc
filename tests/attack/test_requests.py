"""Requests to the serving engine: what is malformed is refused with its field; what goes wrong later ends alone."""

import functools
import itertools
import math
import sys
from collections import deque
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from attack.promises import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

from repro import launch
from repro.baselines.batching import DynamicScheduler, StaticScheduler, lone
from repro.flover import engine as engine_module
from repro.flover.arrivals import poisson_arrivals
from repro.flover.buffers import LAYOUTS
from repro.flover.buffers.paged import PagedBuffers
from repro.flover.cuda_graph import GraphedForward
from repro.flover.engine import Engine, EngineTorn
from repro.flover.parallel import Leader, RankLost, follow
from repro.flover.request import QueueFull, Request, RequestError
from repro.flover.sampling import Sampling, next_tokens
from repro.flover.scheduler import Scheduler
from repro.flover.workload import summary
from repro.models.kernels import Kernels
from repro.models.llama import Llama, LlamaConfig
from repro.models.parallel import Shard

CONFIG = LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=128)
CAPACITY = 100
POISON = 60  # a token whose embedding is NaN, so that all that its request stores and says is NaN
NAN, INF = math.nan, math.inf
ASKED = {"id": 7, "prompt": (1, 2, 3), "max_new_tokens": 5}


class Hostile:
    """Whatever is asked of it raises."""

    def __getattr__(self, name):
        raise RuntimeError("no")

    def __repr__(self):
        raise RuntimeError("no")

    __index__ = __float__ = __len__ = __iter__ = __contains__ = __repr__
    __hash__ = None


def named(value):
    """For a row's name: the same in every process."""
    try:
        text = repr(value)
    except Exception:  # a hostile one, or a number of 5000 digits
        text = " at 0x"
    return f"of {type(value).__name__}" if " at 0x" in text else text


def rows(field, values, *words):
    return [pytest.param({field: value}, [field, *words], id=f"{field} {named(value)}") for value in values]


WHOLE, LIMIT = "must be a whole number", "a whole number of 64 bits"
SECONDS, TOP_P = "0 to 1e+09 seconds", "above 0 and at most 1"
NUMBERS = (NAN, INF, True, None, "5", b"5", 2.5, [5], (5,), {}, 1j, Hostile())  # that are no whole ones
HUGE = 10**5000

MALFORMED = [
    *rows("max_new_tokens", (*NUMBERS, 5.0, np.True_, np.float32(5), np.array([5])), WHOLE, "1 to 2^63 - 1"),
    *rows("max_new_tokens", (torch.tensor(2.5), torch.tensor(True), 0, -1, 2**63, HUGE), WHOLE),
    *rows("prompt", ((), [], np.array([], int), torch.tensor([], dtype=int)), "at least one token"),
    *rows("prompt", (None, 5, "123", b"123", {1: 2}, {1, 2}, NAN), "must be a sequence of whole numbers"),
    *rows("prompt", ((n for n in (1, 2)), Hostile()), "must be"),
    *rows("prompt", (((1, 2),), [[1]], (NAN,), (True,), [b"1"], ["1"], torch.tensor(3)), "prompt[0] is", WHOLE),
    *rows("prompt", ((1, 2.0), (1, None), (1, Hostile())), "prompt[1] is", WHOLE),
    *rows("prompt", (np.array([1.0, 2.0]), torch.tensor([1.0])), "prompt[0] is 1.0", WHOLE),
    *rows("prompt", (np.array([[1, 2]]), torch.tensor([[1, 2]])), "prompt[0] is [1, 2]", WHOLE),
    *rows("prompt", (np.array([True]), torch.tensor([True])), "prompt[0] is True", WHOLE),
    *rows("stop_tokens", (None, 2, "2", b"2", {2: 3}, NAN), "must be a set of whole numbers"),
    *rows("stop_tokens", ({2.0}, [None], ("2",), [[2]], {NAN}, {True}), "stop_tokens[0] is", WHOLE),
    *rows("stop_tokens", (Hostile(), [Hostile()]), "must be"),
    *rows("sampling", (None, 0.7, {"temperature": 1}, "greedy", Sampling, Hostile()), "must be a Sampling"),
    *rows("arrival_s", (-1.0, NAN, INF, -INF, "0", True, 1e10, 10**400, HUGE, 1j, Hostile()), "None", SECONDS),
    *rows("arrival_s", ([0.0], np.array([0.0]), np.float64(-1), np.datetime64(0, "s")), SECONDS),
    *rows("deadline_s", (0, -1.0, NAN, -INF, "1", True, 10**400, [1.0], Hostile()), "None", "above 0 seconds"),
    *rows("id", (None, "7", 7.0, NAN, True, [7], {}, 2**63, -(2**63) - 1, HUGE, Hostile()), LIMIT),
]


@pytest.mark.parametrize(("changes", "words"), MALFORMED)
def test_a_malformed_request_is_refused_with_its_field(changes, words):
    message = refuses(lambda: Request(**ASKED | changes), RequestError, *words)
    assert ("request 7: " in message or "id" in changes) and len(message) < 300


SAMPLING = [
    *rows("temperature", (NAN, INF, -INF, -1.0, -1e-9, 1e-9, 1e-320, 1e300, 10**400), "0 (greedy) or 1e-06 to 1e+06"),
    *rows("temperature", ("0.7", None, True, 1j, [0.7], np.float32(NAN), Hostile()), "0 (greedy)"),
    *rows("top_k", (*NUMBERS, 5.0, -1, -(2**63)), WHOLE, "0 (all) or more"),
    *rows("top_p", (0, 0.0, -0.5, 1.1, 1 + 1e-15, 1e-400, NAN, INF, True, None, "0.9", 10**400), TOP_P),
    *rows("top_p", ([0.9], np.float64(NAN), np.array([0.9]), torch.tensor(0.0), Hostile()), TOP_P),
    *rows("seed", (*NUMBERS, 0.0, -1, 2**63, HUGE), WHOLE, "0 to 2^63 - 1"),
]


@pytest.mark.parametrize(("changes", "words"), SAMPLING)
def test_a_malformed_sampling_is_refused_with_its_field(changes, words):
    refuses(lambda: Sampling(**{"temperature": 0.7} | changes), RequestError, *words)


def small(kernels, shard=None):
    """A model in whose embedding one token is NaN, and which never says that token itself."""
    generator = torch.Generator().manual_seed(5)
    shapes = CONFIG.weight_shapes() | {"output.weight": (CONFIG.vocab, CONFIG.width)}
    weights = {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}
    model = Llama(CONFIG, weights, kernels=kernels, shard=shard)
    model.embedding = model.embedding.clone()
    model.embedding[POISON] = NAN
    if shard is None or shard.rank == 0:
        head = model.head
        model.head = lambda hidden: head(hidden).index_fill(1, torch.tensor(POISON), -INF)
    return model


@functools.cache
def built(kernels):
    return small(kernels)


def good(number, prompt=6, new=12, **options):
    tokens = torch.randint(0, POISON, (prompt,), generator=torch.Generator().manual_seed(number))
    return Request(number, tuple(tokens.tolist()), new, **options)


@functools.cache
def answer_alone(request, kernels="auto"):
    return lone(built(kernels), [request], CAPACITY)[0].tokens


def answers_alone(requests, kernels="auto"):
    return {request.id: answer_alone(request, kernels) for request in requests}


def drained(engine, steps=500):
    """All that ends, by id; each once, in so many steps at most."""
    engine.scheduler.closed = True
    found = {}
    for _ in range(steps):
        for generation in engine.step():
            assert found.setdefault(generation.request.id, generation) is generation, "handed out twice"
        if not engine.ready:
            return found
    raise AssertionError(f"requests run after {steps} steps: {engine.scheduler.running}")


def legal(name, changes, same=None):
    return pytest.param(changes, same or {}, id=name)


WARM = {"temperature": 0.9, "seed": 3}
HALF, STOPS = torch.tensor(0.5, dtype=torch.float64), frozenset(range(30))
PROMPTS = [[1, 2, 3], range(1, 4), deque([1, 2, 3]), np.array([1, 2, 3], np.uint8), torch.tensor([1, 2, 3])]
PROMPTS += [tuple(torch.tensor([1, 2, 3])), tuple(np.array([1, 2, 3], np.int32)), torch.tensor([1, 2, 3]).short()]

LEGAL = [
    # What is accepted, and another way to ask for the same tokens.
    *(
        legal(f"{how} is greedy", {"sampling": Sampling(**{"temperature": 0.9} | how)})
        for how in (
            *({"top_p": p} for p in (1e-50, 5e-324, np.float32(1e-30), 1e-9)),
            *({"top_k": 1}, {"temperature": 1e-6, "seed": 9}, {"temperature": -0.0}, {"temperature": 0, "top_k": 9}),
        )
    ),
    *(
        legal(f"{how} cuts nothing", {"sampling": Sampling(**WARM, **how)}, {"sampling": Sampling(**WARM)})
        for how in ({"top_k": 2**63}, {"top_k": 10**30}, {"top_k": 61}, {"top_k": np.int64(62)}, {"top_p": 1 - 1e-12})
    ),
    *(
        legal(f"sampling of {name}", {"sampling": Sampling(*values)}, {"sampling": Sampling(0.5, 5, 0.5, 4)})
        for name, values in {
            "numpy": (np.float64(0.5), np.int32(5), np.float32(0.5), np.int64(4)),
            "torch": (HALF, torch.tensor(5), HALF, torch.tensor(4)),
            "fractions": (Fraction(1, 2), 5, Fraction(1, 2), 4),
        }.items()
    ),
    legal(
        "a seed of numpy, large",
        {"sampling": Sampling(0.9, seed=np.int64(2**62))},
        {"sampling": Sampling(0.9, seed=2**62)},
    ),
    legal("the hottest", {"sampling": Sampling(1e6, seed=2**63 - 1)}, {"sampling": Sampling(1e6, seed=2**63 - 1)}),
    *(legal(f"prompt {n} as {type(p).__name__}", {"prompt": p}, {"prompt": (1, 2, 3)}) for n, p in enumerate(PROMPTS)),
    *(legal(f"max_new_tokens {n!r}", {"max_new_tokens": n}) for n in (np.int8(5), np.uint64(5), torch.tensor(5))),
    *(
        legal(f"stop_tokens as {type(stops).__name__}", {"stop_tokens": stops}, {"stop_tokens": STOPS})
        for stops in (set(STOPS), list(STOPS), range(30), np.arange(30), torch.arange(30))
    ),
    *(legal(f"no stop_tokens as {stops!r}", {"stop_tokens": stops}) for stops in ((), [], set(), np.array([], int))),
    legal("id of numpy", {"id": np.int64(7)}),
    legal("an infinite deadline is none", {"deadline_s": INF}),
    legal("a late arrival, a later deadline", {"deadline_s": 1e300, "arrival_s": 1e9}),
    legal("times of numpy and fractions", {"arrival_s": np.float32(0.5), "deadline_s": Fraction(10**9)}),
]


@pytest.mark.parametrize(("changes", "same"), LEGAL)
def test_what_is_accepted_is_served_and_means_what_it_says(changes, same):
    """Beside two others, who keep their tokens, and in whose batch some sample and some do not."""
    model, others = built("auto"), [good(1), good(2, sampling=Sampling(0.8, top_k=9, seed=4))]
    asked = Request(**ASKED | changes)
    engine = Engine(model, Scheduler(3), CAPACITY)
    for request in (others[0], asked, others[1]):
        engine.submit(request)
    found = {number: g.tokens for number, g in drained(engine).items()}
    assert found == answers_alone([*others, Request(**ASKED | same)])
    sampling = asked.sampling
    kept = [asked.id, asked.max_new_tokens, *asked.prompt, *asked.stop_tokens, sampling.top_k, sampling.seed]
    assert {type(value) for value in kept} == {int} and type(sampling.temperature) is type(sampling.top_p) is float


IMPOSSIBLE = [
    # At `submit`: what a request asks, and what is said.
    pytest.param({"prompt": (1, 61)}, ["token 61", "0 … 60", "prompt"], id="a token beyond the vocabulary"),
    pytest.param({"prompt": (1, -1)}, ["token -1", "0 … 60"], id="a negative token"),
    pytest.param({"prompt": (2**63,)}, ["token 9223372036854775808", "0 … 60"], id="a token of 64 bits"),
    pytest.param({"prompt": (10**5000,)}, ["token <int>", "0 … 60"], id="a token of 5000 digits"),
    pytest.param({"stop_tokens": {61}}, ["token 61", "0 … 60", "stop_tokens"], id="a stop token beyond the vocabulary"),
    pytest.param({"stop_tokens": {-1, 3}}, ["token -1", "stop_tokens"], id="a negative stop token"),
    pytest.param({"max_new_tokens": 10**12}, ["1000000000002 KV positions, a slot has 40"], id="10^12 new tokens"),
    pytest.param(
        {"max_new_tokens": 2**63 - 1}, ["KV positions, a slot has 40", "max_new_tokens"], id="2^63 - 1 new tokens"
    ),
    pytest.param({"max_new_tokens": 39}, ["needs 41", "a slot has 40", "prompt of 3 tokens"], id="a token too long"),
    pytest.param({"prompt": (1,) * 41, "max_new_tokens": 1}, ["needs 41", "prompt of 41"], id="a prompt too long"),
    pytest.param({"prompt": (1,) * 28}, ["needs 32", "kv_tokens has 30"], id="longer than the limit of all"),
    pytest.param({"prompt": (1,) * 20}, ["needs 24", "the pool has 16"], id="longer than the pool"),
    pytest.param({"id": 1}, ["request 1", "not handed out"], id="the id of one that runs"),
    pytest.param({"id": 2}, ["request 2", "not handed out"], id="the id of one that waits"),
    pytest.param({"id": 3}, ["request 3", "not handed out"], id="the id of one that was cancelled and not handed out"),
]


@pytest.mark.parametrize(("changes", "words"), IMPOSSIBLE)
def test_an_impossible_request_is_refused_and_disturbs_nobody(changes, words):
    model, others = built("auto"), [good(number, 4, 5) for number in (1, 2, 3)]
    pool = functools.partial(PagedBuffers, blocks=4, block=4) if "the pool has 16" in words else LAYOUTS["window"]
    limit = 30 if "kv_tokens has 30" in words else 0
    engine = Engine(model, Scheduler(1, kv_tokens=limit), 40, layout=pool)
    for request in others:
        engine.submit(request)
    engine.step()
    engine.cancel(3)
    asked = Request(**ASKED | changes)
    refuses(lambda: engine.submit(asked), RequestError, f"request {asked.id}: ", *words)
    found = drained(engine)
    assert {n: found[n].tokens for n in (1, 2)} == answers_alone(others[:2])
    assert found[3].finish_reason == "cancelled" and set(found) == {1, 2, 3}
    engine.submit(good(1, 4, 5))  # the id is free again
    assert drained(engine)[1].tokens == found[1].tokens


@pytest.mark.parametrize("given", [None, "a request", 7, {"id": 7}, Request, Hostile()], ids=lambda g: type(g).__name__)
def test_what_is_no_request_is_refused(given):
    engine = Engine(built("auto"), Scheduler(2), CAPACITY)
    for call in (lambda: engine.submit(given), lambda: engine.serve([good(1), given])):
        refuses(call, RequestError, "must be a Request")
    assert not engine.ready and set(drained(engine) or {}) == set()


LIMITS = [
    *rows("slots", (*NUMBERS, 0, -1), "must be at least 1, a whole number"),
    *rows("queue_limit", (*NUMBERS, 0, -1), "must be at least 1, a whole number"),
    *rows("admit_per_iteration", (*NUMBERS, -1), "must be at least 0, a whole number"),
    *rows("kv_tokens", (*NUMBERS, -1), "must be at least 0, a whole number"),
    *rows("prefill_tokens", (*NUMBERS, -1), "must be at least 0, a whole number"),
    *rows("token_gap_s", (NAN, INF, True, None, "5", b"5", [5], 1j, Hostile(), -1, -0.1), "must be at least 0 seconds"),
    *rows("capacity", NUMBERS, WHOLE),
    *rows("capacity", (0, -1, 129, 10**12), "1 to the model's context 128"),
]


@pytest.mark.parametrize(("given", "words"), LIMITS)
def test_a_limit_that_is_none_is_refused(given, words):
    arguments = {"slots": 2, "capacity": 20} | given
    capacity = arguments.pop("capacity")
    refuses(lambda: Engine(built("auto"), Scheduler(**arguments), capacity), ValueError, *words)


def test_the_largest_gap_that_is_accepted_serves():
    requests = [good(number) for number in range(5)]
    engine = Engine(built("auto"), Scheduler(3, token_gap_s=sys.float_info.max), CAPACITY)
    for request in requests:
        engine.submit(request)
    assert {number: g.tokens for number, g in drained(engine).items()} == answers_alone(requests)


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler, DynamicScheduler])
def test_a_full_queue_is_told_and_forgets_who_did_not_fit(scheduler):
    engine = Engine(built("auto"), scheduler(1, queue_limit=2), CAPACITY)
    for number in (1, 2):
        engine.submit(good(number))
    for _ in range(2):  # it is no duplicate the second time
        refuses(lambda: engine.submit(good(3)), QueueFull, "request 3", "2 requests wait")
    assert set(drained(engine)) == {1, 2}
    engine.submit(good(3))
    assert set(drained(engine)) == {3}


@pytest.mark.parametrize("scheduler", [Scheduler, StaticScheduler, DynamicScheduler])
def test_a_scheduler_that_holds_requests_is_refused(scheduler):
    """Of another engine, or submitted to it directly: a new engine would wait for them for ever. Once empty, it serves."""
    engine, direct = Engine(built("auto"), scheduler(2), CAPACITY), scheduler(2)
    for number in (1, 2, 3):
        engine.submit(good(number))
    engine.step()
    direct.submit(good(4))
    for held, words in ((engine.scheduler, "holds 3 requests"), (direct, "holds 1 requests")):
        refuses(lambda held=held: Engine(built("auto"), held, CAPACITY), ValueError, words)
    assert set(drained(engine)) == {1, 2, 3}
    again = Engine(built("auto"), engine.scheduler, CAPACITY)
    again.submit(good(4))
    assert drained(again)[4].tokens == answer_alone(good(4))


def test_cancelling_who_is_unknown_finished_or_cancelled_is_false_and_changes_nothing():
    model = built("auto")
    engine = Engine(model, Scheduler(1), CAPACITY)
    for number in (1, 2, 3):
        engine.submit(good(number))
    engine.step()
    assert engine.cancel(2) and engine.cancel(1) and not engine.cancel(1) and not engine.cancel(2)
    assert not any(engine.cancel(number) for number in (99, -1, None, "3", NAN, [3], (), {}))
    found = drained(engine)
    assert [found[n].finish_reason for n in (1, 2, 3)] == ["cancelled", "cancelled", "length"]
    assert found[3].tokens == answers_alone([good(3)])[3] and not engine.cancel(3)
    assert engine.step() == [] and not engine.ready


def test_no_arrivals_of_no_requests():
    assert poisson_arrivals(0, 0.5, seed=1).tolist() == []


POLICIES = {
    "fused": lambda: Scheduler(3),
    "in one pass": lambda: Scheduler(3, token_gap_s=0),
    "in short passes": lambda: Scheduler(3, token_gap_s=1e-9),
    "chunked": lambda: Scheduler(3, prefill_tokens=4),
    "one at a boundary": lambda: Scheduler(3, admit_per_iteration=1),
    "serial": lambda: Scheduler(1),
    "static": lambda: StaticScheduler(3),
    "dynamic": lambda: DynamicScheduler(3, window_s=0.0),
}
KERNELS = ["auto", "torch"]


def poisoned(engine, step):
    """Feed a NaN to request 0 at a step: its prompt has one already (None), or so many tokens of its answer are good."""
    for slot, generation in engine.scheduler.running.items():
        if generation.request.id == 0 and step is not None and len(generation.tokens) == step:
            engine.buffers.tokens[slot] = POISON


def served_beside_the_poisoned(engine, first, step=None, kernels="auto"):
    """Others before, beside and after request `first`, so that its slot is used again; the generations by id."""
    others = [good(n, 3 + 5 * n, 4 + n, sampling=Sampling(0.8 * (n % 2), seed=n)) for n in range(1, 8)]
    for request in (others[0], first, *others[1:]):
        engine.submit(request)
    engine.scheduler.closed = True
    found = {}
    while engine.ready:
        poisoned(engine, step)
        found |= {g.request.id: g for g in engine.step()}
    alone = answers_alone(others, kernels)
    assert {n: found[n].tokens for n in alone} == alone
    assert {found[n].finish_reason for n in alone} == {"length"}
    assert not engine.scheduler.running and not engine.scheduler.waiting
    cache = engine.buffers.cache
    assert cache.keys.isfinite().all() and cache.values.isfinite().all(), "NaN stays behind"
    return found


STEPS = {"in the prompt": None, "in the first pass": 1, "in the third pass": 3}


@pytest.mark.parametrize(
    ("kernels", "layout", "policy", "step"),
    [
        pytest.param(kernels, layout, policy, step, id=f"{kernels}-{layout}-{policy}-{where}")
        for kernels, layout, policy, (where, step) in itertools.product(KERNELS, LAYOUTS, POLICIES, STEPS.items())
        if policy == "fused" or (kernels == "auto" and step is None)
    ],
)
def test_a_request_whose_logits_are_nan_ends_alone(kernels, layout, policy, step):
    model = built(kernels)
    prompt = (5, POISON, *range(12)) if step is None else tuple(range(14))
    first = Request(0, prompt, 20, sampling=Sampling(0.9, top_k=5) if step == 3 else Sampling())
    place = functools.partial(PagedBuffers, block=4) if layout == "paged" else LAYOUTS[layout]
    engine = Engine(model, POLICIES[policy](), CAPACITY, layout=place)
    broken = served_beside_the_poisoned(engine, first, step, kernels)[0]
    assert broken.finish_reason == "error" and "NaN" in broken.cause and f"token {step or 0}" in broken.cause
    whole = answers_alone([first], kernels)[0] if step else []
    assert broken.tokens == whole[: step or 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("end", ["cancelled", "deadline"])
def test_a_prompt_with_nan_that_is_given_up_leaves_none(layout, end):
    """Its logits were never looked at; kernels in torch read beyond what the next in its slot has stored."""
    model, times = built("torch"), [0.0]
    engine = Engine(model, Scheduler(2, prefill_tokens=4), CAPACITY, lambda: times[-1], layout=LAYOUTS[layout])
    engine.submit(Request(0, (POISON,) * 40, 5, deadline_s=1.0))
    assert [engine.step() for _ in range(3)] == [[], [], []]
    if end == "cancelled":
        assert engine.cancel(0)
    times.append(2.0)
    assert drained(engine)[0].finish_reason == end
    served_beside_the_poisoned(engine, good(9, 3, 4), kernels="torch")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_a_graph_ends_alone(layout, monkeypatch):
    model = built("auto")
    if model.kernels.name != "C++":
        pytest.skip("kernels in torch look at spans of slots, which a graph does not know")

    def record(run):
        result = run().clone()
        return lambda: result.copy_(run())

    monkeypatch.setattr(model.kernels, "capturable", True, raising=False)
    monkeypatch.setattr(engine_module, "GraphedForward", lambda *args: GraphedForward(*args, record=record))
    engine = Engine(model, Scheduler(3), CAPACITY, layout=LAYOUTS[layout])
    assert engine._graphs is not None
    engine.prepare()
    broken = served_beside_the_poisoned(engine, Request(0, tuple(range(14)), 20), step=2)[0]
    assert broken.finish_reason == "error" and len(broken.tokens) == 2


LOGITS = [
    # One row among others; None: no token can be told, else its greedy one.
    pytest.param([NAN] * 5, None, id="all NaN"),
    pytest.param([NAN, 1, 2, 3, 4], None, id="NaN first"),
    pytest.param([0, 1, NAN, 3, 4], None, id="NaN in the middle"),
    pytest.param([0, 1, 2, 3, NAN], None, id="NaN last"),
    pytest.param([0, -NAN, 2, 3, 9], None, id="negative NaN"),
    pytest.param([0, INF, 2, 3, 4], None, id="infinite"),
    pytest.param([INF, INF, 2, NAN, 4], None, id="infinite and NaN"),
    pytest.param([INF] * 5, None, id="all infinite"),
    pytest.param([-INF] * 5, None, id="all minus infinite"),
    pytest.param([-INF, INF, -INF, 0, 0], None, id="both infinities"),
    pytest.param([-INF, 1, 5, -INF, 2], 2, id="some ruled out"),
    pytest.param([-INF, -INF, -INF, -INF, -3e38], 4, id="all but one ruled out"),
    pytest.param([3e38, -3e38, 3.1e38, 0, 1], 2, id="almost infinite"),
    pytest.param([0.0, -0.0, 0, 0, 0], 0, id="equal"),
    pytest.param([1e-45, 0, 0, 0, 0], 0, id="denormal"),
]
WAYS = {
    "greedy": Sampling(),
    "warm": Sampling(0.8, seed=1),
    "top k": Sampling(0.8, top_k=2, seed=1),
    "top p": Sampling(0.8, top_p=0.5, seed=1),
    "tiny top p": Sampling(0.8, top_k=3, top_p=1e-50),
    "coldest": Sampling(1e-6, seed=1),
    "hottest": Sampling(1e6, top_p=0.9, seed=1),
}


@pytest.mark.parametrize("width", [5, 61, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("row", "greedy"), LOGITS)
def test_logits_that_tell_no_token_give_none_and_leave_the_other_rows(row, greedy, dtype, width):
    """At any width, in C++ and in torch, however the rows sample; what is ruled out is never drawn."""
    least = min((v for v in row if math.isfinite(v)), default=-INF)
    row = torch.tensor([*row, *[least - 1] * (width - 5)], dtype=torch.float32)
    row = row.nan_to_num(nan=NAN, posinf=INF, neginf=-INF).to(dtype)
    fine = torch.randn(2, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    logits = torch.stack([fine[0], row, fine[1]])
    for kernels in (built("auto").kernels, Kernels()):
        assert kernels.argmax(logits)[1] == (-1 if greedy is None else row.argmax())
        for sampling in WAYS.values():
            asked = [(sampling, 3), (sampling, 5), (Sampling(), 0)]
            before, found, after = next_tokens(logits, asked, kernels.argmax).tolist()
            alone = [next_tokens(fine[n : n + 1], [asked[2 * n]], kernels.argmax).item() for n in (0, 1)]
            assert [before, after] == alone
            assert found == -1 if greedy is None else found >= 0 and row[found] > -INF


class Flaky:
    """`call`, but the calls with these numbers raise."""

    def __init__(self, call, *failing, error=MemoryError):
        self.call, self.failing, self.error, self.calls = call, failing, error, 0

    def __call__(self, *args):
        self.calls += 1
        if self.calls in self.failing:
            raise self.error("in the middle")
        return self.call(*args)


def interrupted(monkeypatch, model, where, *failing, error=MemoryError):
    """Let passes fail, the model's part or the sampling's."""
    if where == "model":
        monkeypatch.setattr(model, "forward", Flaky(model.forward, *failing, error=error))
    else:
        monkeypatch.setattr(engine_module, "next_tokens", Flaky(next_tokens, *failing, error=error))


def survived(engine, error, steps=500):
    """Step until nothing is left, whatever is raised; what ended, and the messages."""
    found, raised = {}, []
    for _ in range(steps):
        if not engine.ready:
            return found, raised
        try:
            for generation in engine.step():
                assert found.setdefault(generation.request.id, generation) is generation, "handed out twice"
        except error as told:
            raised.append(told)
    raise AssertionError("no end")


FAILURES = itertools.cycle(
    [("auto", "model", MemoryError), ("torch", "sampling", RuntimeError), ("auto", "model", KeyboardInterrupt)]
)


@pytest.mark.parametrize(
    ("layout", "policy", "kernels", "where", "error"),
    [(layout, policy, *next(FAILURES)) for layout in LAYOUTS for policy in POLICIES],
)
def test_a_pass_that_fails_is_repeated_and_no_answer_is_lost_or_changed(
    layout, policy, kernels, where, error, monkeypatch
):
    model, requests = built(kernels), [good(n, 3 + n, 1 + 3 * n) for n in range(6)]
    alone = answers_alone(requests, kernels)
    engine = Engine(model, POLICIES[policy](), CAPACITY, layout=LAYOUTS[layout])
    engine.scheduler.closed = True
    for request in requests:
        engine.submit(request)
    interrupted(monkeypatch, model, where, 1, 2, 4, 9, error=error)
    found, raised = survived(engine, error)
    assert {n: g.tokens for n, g in found.items()} == alone and len(raised) == 4
    assert error is KeyboardInterrupt or "the next step repeats it" in raised[0].__notes__[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_never_works_again_keeps_what_had_ended(policy, monkeypatch):
    """The step after the one that failed hands it out; who runs can be cancelled, with the tokens that he has."""
    model, requests = built("auto"), [good(n, 3, 9) for n in range(4)]
    alone = answers_alone(requests)
    engine = Engine(model, POLICIES[policy](), CAPACITY)
    for request in requests:
        engine.submit(request)
    engine.scheduler.closed = True
    assert engine.step() == engine.step() == []
    interrupted(monkeypatch, model, "model", *range(1, 99))
    engine.cancel(0 if policy in ("fused", "chunked", "one at a boundary") else 3)
    with pytest.raises(MemoryError) as told:
        engine.step()
    assert "1 answers that had ended are kept" in told.value.__notes__[0]
    found = {g.request.id: g for g in engine.step()}
    assert len(found) == 1
    for _ in range(2):
        with pytest.raises(MemoryError) as told:
            engine.step()
        assert "no answer is lost" in told.value.__notes__[0]
    for request in requests:
        engine.cancel(request.id)
    later, _ = survived(engine, MemoryError)
    assert set(found) | set(later) == set(alone) and not set(found) & set(later)
    for number, generation in (found | later).items():
        assert generation.finish_reason == "cancelled"
        assert generation.tokens == alone[number][: len(generation.tokens)]


@pytest.mark.parametrize("end", ["cancelled", "deadline"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_leaves_after_a_pass_that_failed_disturbs_nobody(layout, end, monkeypatch):
    """Two prompts were admitted together, the first moves for it: it is still the first, and the second has the rest."""
    model, times = built("auto"), [0.0]  # on a clock that stands still a pass may take 64 prompt tokens
    leaving = good(1, 3, 20, deadline_s=1.0)
    asked = [good(0, 3, 2), leaving, good(2, 3, 20), good(3, 10, 5), good(4, 100, 5)]
    alone = {request.id: lone(model, [replace(request, deadline_s=None)], 128)[0].tokens for request in asked}
    engine = Engine(model, Scheduler(4), 128, lambda: times[-1], layout=LAYOUTS[layout])
    found = {}
    for together in (asked[:3], asked[3:]):
        for request in together:
            engine.submit(request)
        while len(found) < 1:
            found |= {g.request.id: g for g in engine.step()}
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", Flaky(model.forward, 1))
        with pytest.raises(MemoryError):
            engine.step()
    assert [g.request.id for g in engine.running] == [1, 2, 3, 4]
    if end == "cancelled":
        assert engine.cancel(1)
    times.append(2.0)
    found |= drained(engine)
    assert found[1].finish_reason == end
    assert {n: g.tokens for n, g in found.items()} == alone | {1: alone[1][: len(found[1].tokens)]}


def test_serve_keeps_the_report_of_what_had_ended_when_a_pass_fails(monkeypatch):
    model, requests = built("auto"), [good(n, 3, new) for n, new in enumerate((2, 9, 4, 9))]
    alone = answers_alone(requests)
    engine = Engine(model, Scheduler(2), CAPACITY)
    interrupted(monkeypatch, model, "model", 7)
    with pytest.raises(MemoryError):
        engine.serve([*requests, Request(9, (61,), 2)])
    assert {g.request.id: g.tokens for g in engine.report.generations} == {n: alone[n] for n in (0, 2)}
    assert list(engine.report.rejected) == [9] and engine.report.total_seconds > 0 and engine.report.iterations
    assert {n: g.tokens for n, g in drained(engine).items()} == {n: alone[n] for n in (1, 3)}


def test_a_step_that_broke_off_elsewhere_hands_out_what_it_can_and_refuses_the_rest(monkeypatch):
    """As by Ctrl-C between the tokens that are handed out: somebody would miss one."""
    model = built("auto")
    engine = Engine(model, Scheduler(2), CAPACITY)
    for number in range(3):
        engine.submit(good(number))
    engine.step()
    engine.cancel(2)
    monkeypatch.setattr(engine.buffers, "advance", Flaky(engine.buffers.advance, 1, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert [g.request.id for g in engine.step()] == [2]
    for _ in range(2):
        refuses(engine.step, EngineTorn, "an earlier step broke off", "new engine, with a new scheduler")
    refuses(lambda: Engine(model, engine.scheduler, CAPACITY), ValueError, "the scheduler holds 2 requests")


class Greedy(Scheduler):
    """A policy that asks nobody for room."""

    def admit(self, fits=len):
        return [self.waiting.popleft() for _ in range(len(self.waiting))]


@pytest.mark.parametrize("layout", [*LAYOUTS, "small pool"])
def test_who_is_admitted_without_room_ends_alone(layout):
    model, requests = built("auto"), [good(n, 5, 9) for n in range(5)]
    place = functools.partial(PagedBuffers, blocks=8, block=4) if layout == "small pool" else LAYOUTS[layout]
    engine = Engine(model, Greedy(2), CAPACITY, layout=place)
    for request in requests:
        engine.submit(request)
    found = drained(engine)
    assert {n: found[n].tokens for n in (0, 1)} == answers_alone(requests[:2])
    assert all(found[n].finish_reason == "error" and "no room" in found[n].cause for n in (2, 3, 4))


class Hasty(Scheduler):
    """A policy that admits whoever there is a slot for, however long the prompts before are."""

    def admit(self, fits=len):
        return [self.waiting.popleft() for _ in range(min(len(self.waiting), self.slots - len(self.running)))]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_prompts_that_are_admitted_before_their_turn_wait_in_their_slots(kernels, layout):
    """While others decode around them, nothing is written to them, and nothing that they have is lost."""
    model, requests = built(kernels), [good(n, 4 + 7 * (n % 4), 3 + 4 * (n % 3)) for n in range(9)]
    engine = Engine(model, Hasty(5, prefill_tokens=4), CAPACITY, layout=LAYOUTS[layout])
    for request in requests:
        engine.submit(request)
    found, waiting = {}, 0
    while engine.ready:
        found |= {g.request.id: g.tokens for g in engine.step()}
        prompts = {slot: g for slot, g in engine.scheduler.running.items() if not g.tokens}
        assert all(engine.buffers.lengths[slot] == g.prefilled for slot, g in prompts.items())
        waiting += len(prompts) > 1
    assert found == answers_alone(requests, kernels) and waiting


def test_a_summary_counts_answers_that_broke_off_apart():
    engine = Engine(built("auto"), Scheduler(2), CAPACITY)
    report = engine.serve([good(1), Request(0, (POISON,), 5)])
    assert list(report.failed) == [0] and "NaN" in report.failed[0]
    assert summary(report)["output_tokens"] == 12 and summary(report)["latency_mean"] == report.generations[1].latency_s


def _ranks(rank: int, size: int) -> object:
    """NaN of one request on two ranks; then a pass that fails on rank 0 alone."""
    model = small("torch", Shard.of())
    if rank:
        try:
            return follow(model)
        except RankLost as error:
            return str(error)
    with Leader(model) as leader:
        engine = Engine(leader, Scheduler(3), CAPACITY, layout=LAYOUTS["paged"])
        requests = [good(1), Request(0, (POISON,) * 40, 9), *(good(n, 20, 4) for n in range(2, 7))]
        report = engine.serve(requests)
        told = [{g.request.id: (g.finish_reason, g.tokens) for g in report.generations}]
        engine.submit(good(8))
        leader.model.forward = Flaky(leader.model.forward, 1)
        for error in (MemoryError, RankLost, RankLost):
            try:
                engine.step()
            except error as raised:
                told.append(f"{type(raised).__name__}: {raised}")
    return told


def test_ranks_go_on_without_the_request_that_failed_and_end_with_the_pass_that_did():
    (answers, *told), follower = launch.launch(_ranks, 2, timeout_s=60)
    assert answers.pop(0) == ("error", [])
    alone = answers_alone([good(1), *(good(n, 20, 4) for n in range(2, 7))], "torch")
    assert answers == {number: ("length", tokens) for number, tokens in alone.items()}
    assert told[0].startswith("MemoryError") and all("an earlier pass failed" in later for later in told[1:])
    assert len(told) == 3 and "a tensor-parallel rank is gone" in follower


WAY = st.sampled_from(
    [Sampling(), Sampling(0.8, seed=1), Sampling(1.5, top_k=2**63, seed=2), Sampling(1.0, top_p=1e-50)]
)
SUBMITTED = st.builds(
    lambda *of: ("submit", of),
    st.integers(0, 30),  # id: some twice
    st.integers(1, 40),
    st.integers(1, 15),
    WAY,
    st.sets(st.integers(0, 60), max_size=3),
    st.sampled_from([None, None, 0.05, 1e300]),
    st.sampled_from([False] * 9 + [True]),  # with a NaN
)
MOVES = st.one_of(
    SUBMITTED,
    st.tuples(st.just("malformed"), st.sampled_from([row.values[0] for row in MALFORMED])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("fail"), st.just(None)),
)
PLACES = {**LAYOUTS, "small pool": functools.partial(PagedBuffers, blocks=12, block=8)}


class Clock:
    """Time passes by 1 ms whenever it is read."""

    now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


def sequence(moves, layout, policy, kernels, queue):
    """Do all moves, then drain: everybody who was accepted is answered once, with the tokens of a lone run."""
    model = built(kernels)
    engine = Engine(model, POLICIES[policy](), CAPACITY, Clock(), layout=PLACES[layout])
    engine.scheduler.queue_limit = queue
    accepted, ended, cancelled = {}, {}, set()
    forward, failing = model.forward, [0]

    def flaky(*args):
        failing[0] -= 1
        if failing[0] == 0:
            raise MemoryError
        return forward(*args)

    def step():
        try:
            for generation in engine.step():
                number = generation.request.id
                ended.setdefault(number, []).append(generation)
                assert len(ended[number]) <= len(accepted[number])
        except MemoryError:
            pass

    def submit(number, prompt, new, sampling, stops, deadline, with_nan):
        request = good(number, prompt, new, sampling=sampling, stop_tokens=stops, deadline_s=deadline)
        if with_nan:
            request = replace(request, prompt=(*request.prompt[:-1], POISON))
        try:
            engine.submit(request)
        except RequestError as error:
            assert len(accepted[number]) > len(ended.get(number, [])) or "the pool has" in str(error), error
        except QueueFull:
            assert len(engine.scheduler.waiting) == queue
        else:
            accepted.setdefault(number, []).append(request)

    model.forward = flaky
    try:
        for kind, what in moves:
            if kind == "submit":
                submit(*what)
            elif kind == "malformed":
                refuses(lambda what=what: engine.submit(Request(**ASKED | what)), RequestError)
            elif kind == "cancel":
                cancelled |= {what} if engine.cancel(what) else set()
            elif kind == "fail":
                failing[0] = 1
            else:
                for _ in range(what):
                    step()
        engine.scheduler.closed = True
        for _ in range(2000):
            step()
            if not engine.ready:
                break
    finally:
        del model.forward
    cache = engine.buffers.cache
    assert cache.keys.isfinite().all() and cache.values.isfinite().all()
    assert {n: len(of) for n, of in ended.items()} == {n: len(of) for n, of in accepted.items()}
    for number, generations in ended.items():
        for request, generation in zip(accepted[number], generations, strict=True):
            check(request, generation, kernels, number in cancelled)
    return sum(map(len, ended.values()))


def check(request, generation, kernels, cancelled):
    """An answer is that of a lone run, or its beginning, with a reason why it ended there."""
    asked = replace(generation.request, arrival_s=None)
    assert asked == request
    alone = [] if POISON in request.prompt else answer_alone(replace(request, id=0, deadline_s=None), kernels)
    reason = generation.finish_reason
    if reason in ("length", "stop"):
        assert generation.tokens == alone and (reason == "stop") == (alone[-1] in request.stop_tokens)
    else:
        assert generation.tokens == alone[: len(generation.tokens)]
        assert reason != "error" or POISON in request.prompt
        assert reason != "cancelled" or cancelled
        assert reason != "deadline" or request.deadline_s == 0.05


SEQUENCES = {
    "moves": st.lists(MOVES, min_size=5, max_size=40),
    "layout": st.sampled_from(list(PLACES)),
    "policy": st.sampled_from(list(POLICIES)),
    "kernels": st.sampled_from(KERNELS),
    "queue": st.sampled_from([2, 5, 1024]),
}


@settings(max_examples=25, deadline=None)
@given(**SEQUENCES)
def test_sequences_of_requests(moves, layout, policy, kernels, queue):
    sequence(moves, layout, policy, kernels, queue)


@pytest.mark.exhaustive
@settings(max_examples=40, deadline=None)
@given(**SEQUENCES | {"moves": st.lists(MOVES, min_size=30, max_size=120)})
def test_many_sequences_of_requests(moves, layout, policy, kernels, queue):
    sequence(moves, layout, policy, kernels, queue)
