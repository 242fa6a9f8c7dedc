"""The policy without a model."""

import pytest

from repro.flover.request import Generation, QueueFull, Request
from repro.flover.scheduler import Scheduler


def asked(*ids: int) -> list[Request]:
    return [Request(i, (1,), 2) for i in ids]


def run(scheduler: Scheduler, requests: list[Request]) -> None:
    for request in requests:
        slot = len(scheduler.running)
        scheduler.running[slot] = Generation(request, slot)


def test_admits_in_order_as_many_as_fit():
    scheduler = Scheduler(slots=3)
    for request in asked(5, 4, 3, 2):
        scheduler.submit(request)
    first = scheduler.admit()
    assert [request.id for request in first] == [5, 4, 3]
    run(scheduler, first)
    assert scheduler.admit() == [] and [request.id for request in scheduler.waiting] == [2]


def test_the_authors_code_admits_one_per_iteration():
    scheduler = Scheduler(slots=3, admit_per_iteration=1)
    for request in asked(1, 2):
        scheduler.submit(request)
    assert [request.id for request in scheduler.admit()] == [1]
    assert [request.id for request in scheduler.admit()] == [2]


def test_queue_limit_pushes_back_and_keeps_what_waits():
    scheduler = Scheduler(slots=1, queue_limit=2)
    for request in asked(1, 2):
        scheduler.submit(request)
    with pytest.raises(QueueFull, match="request 3: 2 requests wait"):
        scheduler.submit(asked(3)[0])
    assert [request.id for request in scheduler.waiting] == [1, 2]


def test_retires_only_what_is_done():
    scheduler = Scheduler(slots=3)
    run(scheduler, [Request(1, (1,), 1), Request(2, (1,), 9), Request(3, (1,), 9, stop_tokens=frozenset({7}))])
    for generation in scheduler.running.values():
        generation.append(7)
    assert scheduler.retire() == [0, 2]


def test_the_budget_is_shared_in_order_of_arrival():
    """64 tokens before any pass was timed. Prompts that the next pass does not get to need no slot."""
    scheduler = Scheduler(slots=9)
    for number, length in enumerate((40, 20, 30, 5)):
        scheduler.submit(Request(number, (1,) * length, 2))
    assert scheduler.prompt_tokens == 64
    first = scheduler.admit()
    assert [request.id for request in first] == [0, 1, 2]  # of the third, 4 tokens
    run(scheduler, first)
    for generation, prefilled in zip(scheduler.running.values(), (40, 20, 4), strict=True):
        generation.prefilled = prefilled
    assert scheduler.prompt_tokens == 64 and [request.id for request in scheduler.admit()] == [3]


def test_a_first_prompt_is_whole_only_while_nobody_decodes():
    scheduler = Scheduler(slots=9)
    for number in range(2):
        scheduler.submit(Request(number, (1,) * 500, 9))
    assert scheduler.prompt_tokens == 500
    run(scheduler, scheduler.admit())
    assert scheduler.prompt_tokens == 500 and list(scheduler.running) == [0]
    scheduler.running[0].prefilled = 500
    scheduler.running[0].append(1)
    assert scheduler.prompt_tokens == 64
    run(scheduler, scheduler.admit())
    scheduler.running[1].prefilled = 64
    scheduler.running[0].finish_reason = "cancelled"
    assert scheduler.prompt_tokens == 436  # what is left of the second
    scheduler.prefill_tokens = 100
    assert scheduler.prompt_tokens == 100  # a fixed limit holds always


def test_the_first_that_does_not_fit_ends_an_admission():
    scheduler = Scheduler(slots=9, kv_tokens=10)
    for number, new in enumerate((4, 4, 9, 1)):
        scheduler.submit(Request(number, (1,), new))
    first = scheduler.admit()
    assert [request.id for request in first] == [0, 1]  # 4 + 4; 9 more are too many, and nobody overtakes
    run(scheduler, first)
    assert scheduler.admit() == []
    del scheduler.running[0]
    assert scheduler.admit() == []  # 4 + 9
    del scheduler.running[1]
    assert [request.id for request in scheduler.admit(lambda needed: min(len(needed), 1))] == [2]


def test_who_waits_too_long_leaves_the_queue():
    scheduler = Scheduler(slots=1)
    for number, deadline in enumerate((None, 2.0, 5.0)):
        scheduler.submit(Request(number, (1,), 1, arrival_s=1.0, deadline_s=deadline))
    assert scheduler.expired(2.9) == []
    assert [request.id for request in scheduler.expired(3.0)] == [1]
    assert [request.id for request in scheduler.waiting] == [0, 2]
