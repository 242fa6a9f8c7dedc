"""The policy without a model."""

import pytest

from repro.flover.request import Generation, QueueFull, Request, RequestError
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
        generation.tokens.append(7)
    assert scheduler.retire() == [0, 2]


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"slots": 1, "queue_limit": 0}, {"slots": 1, "admit_per_iteration": -1}]
)
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match="must be at least"):
        Scheduler(**wrong)


@pytest.mark.parametrize(
    ("prompt", "new", "arrival", "message"),
    [((), 1, 0.0, "prompt is empty"), ((1,), 0, 0.0, "max_new_tokens is 0"), ((1,), 1, -1.0, "arrival_s is -1")],
)
def test_a_malformed_request_is_refused(prompt, new, arrival, message):
    with pytest.raises(RequestError, match=message):
        Request(1, prompt, new, arrival)
