"""Concurrent instances are real processes: the same tokens, in order of arrival, and no hang when one dies."""

import functools
import itertools
import os
import signal
import threading
import time

import psutil
import pytest

from repro.baselines import instances
from repro.baselines.batching import lone
from repro.flover.request import Request
from repro.launch import RankError
from repro.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=256
)  # as of the fixture `model`
BUILD = functools.partial(Llama.random, CONFIG, seed=7)


@pytest.mark.slow
def test_every_request_gets_its_own_tokens_from_who_is_free(model):
    requests = [Request(n, (n + 1, 2, 3), 5 + 3 * n, arrival_s=0.05 * n) for n in range(5)]
    served = instances.serve(BUILD, requests[::-1], 2, 64, threads=2, paces=(1, 2), timeout_s=120, passes=3)
    assert len(served.passes) == 3
    assert served.report.total_seconds == sorted(each.total_seconds for each in served.passes)[1]
    alone = [g.tokens for g in lone(model, requests, 64)]
    for each in served.passes:
        assert [g.tokens for g in each.generations] == alone
        assert each.total_seconds == max(g.finish_s for g in each.generations)
        assert each.iterations == each.rows == sum(4 + 3 * n for n in range(5))
    generations = served.report.generations
    assert [g.request.id for g in generations] == list(range(5)) and {g.slot for g in generations} == {0, 1}
    for g in generations:
        assert g.request.arrival_s <= g.admitted_s < g.first_token_s < g.finish_s <= served.report.total_seconds
    for number in (0, 1):  # one request at a time
        mine = sorted((g for g in generations if g.slot == number), key=lambda g: g.admitted_s)
        assert all(before.finish_s <= after.admitted_s for before, after in itertools.pairwise(mine))
    assert len(served.instance_bytes) == 2 and min(served.instance_bytes) > 2**20
    assert set(served.pace_s) == {1, 2} and served.slowdown(1) == 1 and served.slowdown(2) > 0
    with pytest.raises(ValueError, match="3 instances run, but the pace was measured up to 2 only"):
        served.slowdown(3)


def _kill_one_that_waits() -> None:
    """The youngest child that has done its part of the work: it has stopped using the processor."""
    parent, spent = psutil.Process(), {}
    while True:
        for child in parent.children():
            used = sum(child.cpu_times()[:2])
            if "spawn_main" in " ".join(child.cmdline()) and used > 1 and spent.get(child.pid) == used:
                os.kill(child.pid, signal.SIGKILL)
                return
            spent[child.pid] = used
        time.sleep(0.5)


@pytest.mark.slow
def test_a_killed_instance_ends_the_run_with_its_signal():
    """The requests come in an hour, so nothing but the death can end it before the timeout, which would be another
    error."""
    requests = [Request(n, (1, 2), 4, arrival_s=3600.0) for n in range(3)]
    before = {child.pid for child in psutil.Process().children()}
    killer = threading.Thread(target=_kill_one_that_waits, daemon=True)
    killer.start()
    with pytest.raises(RankError, match="killed by signal 9") as caught:
        instances.serve(BUILD, requests, 3, 16, threads=2, timeout_s=200)
    assert caught.value.signal == signal.SIGKILL
    killer.join()
    left = [c for c in psutil.Process().children() if c.pid not in before and "spawn_main" in " ".join(c.cmdline())]
    assert not left  # nobody is left behind


@pytest.mark.slow
def test_an_error_inside_an_instance_is_the_one_that_is_raised():
    with pytest.raises(RankError, match="RequestError: request 4: needs 21 KV positions, a slot has 16"):
        instances.serve(BUILD, [Request(4, (1, 2), 20, arrival_s=0.0)], 2, 16, threads=1, timeout_s=100)


@pytest.mark.slow
def test_a_prompt_that_fits_no_instance_is_named():
    with pytest.raises(RankError, match="RequestError: request 4: needs 20 KV positions, a slot has 16"):
        instances.serve(BUILD, [Request(4, (1,) * 20, 1, arrival_s=0.0)], 1, 16, threads=1, timeout_s=100)


@pytest.mark.parametrize("pace_s", [{}, {2: 0.1, 4: 0.2}])
def test_no_slowdown_without_the_pace_of_one(pace_s):
    with pytest.raises(ValueError, match=r"the pace was measured of (no|\[2, 4\]).*: 1 is needed"):
        instances.Served([], [], pace_s).slowdown(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instances": 0}, "instances is 0"),
        ({"paces": (1, 3)}, r"paces \[1, 3\]: at least 1, and 1 to 2"),
        ({"passes": 0}, "passes is 0: at least 1"),
        ({"requests": []}, "at least one is needed"),
        ({"requests": [Request(0, (1,), 2)]}, "each with its arrival_s"),
    ],
)
def test_arguments_are_checked(changes, words):
    arguments = {"requests": [Request(0, (1,), 2, 0.0)], "instances": 2, "capacity": 16, "threads": 1} | changes
    with pytest.raises(ValueError, match=words):
        instances.serve(BUILD, **arguments)
