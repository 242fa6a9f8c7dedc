"""What is under way: in the order of its start, hop by hop, so many at most; and what ends it is told at every call."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest

from repro.comm import Pending, Stream

WAIT_S = 20.0  # for what must happen; nothing waits so long that goes well


class _Messages:
    """A round of messages that arrives when it is told to."""

    def __init__(self) -> None:
        self.sent, self.come = threading.Event(), threading.Event()

    def arrive(self) -> None:
        self.sent.set()
        assert self.come.wait(WAIT_S)


def _collective(rounds: list[_Messages], result: Any = None) -> Generator:
    yield from rounds
    return result


def _two_hops(collectives: int) -> list[list[_Messages]]:
    return [[_Messages(), _Messages()] for _ in range(collectives)]


def test_a_collective_follows_the_one_before_it_from_hop_to_hop():
    """At each hop one at a time, on both at the same time."""
    first, second = _two_hops(2)
    stream = Stream(most=3)
    pending = [stream.start(_collective(rounds, number)) for number, rounds in enumerate((first, second))]
    assert first[0].sent.wait(WAIT_S) and not second[0].sent.is_set()
    first[0].come.set()
    assert first[1].sent.wait(WAIT_S) and second[0].sent.wait(WAIT_S)  # each on another hop
    second[0].come.set()
    assert not second[1].sent.wait(0.05)  # the first is still there
    assert not pending[0].ended(0)
    first[1].come.set()
    assert second[1].sent.wait(WAIT_S)
    second[1].come.set()
    assert [each.wait() for each in pending] == [0, 1]
    assert pending[0].wait() == 0  # at every call


def test_there_is_room_for_so_many_and_one_more_has_to_wait():
    stream, rounds = Stream(most=2), [[_Messages()] for _ in range(3)]
    for number in range(2):
        stream.make_room()
        stream.start(_collective(rounds[number]))
    waiting = threading.Thread(target=stream.make_room, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    rounds[0][0].come.set()
    waiting.join(WAIT_S)
    assert not waiting.is_alive()
    rounds[1][0].come.set()
    stream.finish()


def _raises() -> Generator:
    yield from ()
    raise ConnectionError("gone")


@pytest.mark.parametrize("inline", [False, True])
def test_what_ends_a_collective_is_raised_by_all_who_wait_for_it(inline):
    stream = Stream(most=2, inline=inline)
    uses: list[Callable[[], Any]]
    if inline:
        uses = [lambda: stream.start(_raises())]
    else:
        pending = stream.start(_raises())
        uses = [pending.wait, stream.finish, stream.finish]
        assert pending.ended(WAIT_S) and isinstance(pending.failed, ConnectionError)
    for use in uses:
        with pytest.raises(ConnectionError, match="gone"):
            use()


def test_without_a_stream_who_waits_does_the_work():
    messages = _Messages()
    messages.come.set()
    assert Pending(_collective([messages], "result")).wait() == "result"


def test_a_stream_that_is_gone_leaves_no_thread():
    stream = Stream(most=2)
    stream.start(_collective([])).wait()
    (thread,) = stream._threads
    del stream
    thread.join(WAIT_S)
    assert not thread.is_alive()
