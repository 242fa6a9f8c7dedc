"""Collectives under way: threads take them from hop to hop while the program computes.

A collective is a generator that yields what it has just sent and waits for (`exchange.Round`). gloo tells nobody that a
message has arrived; one has to wait for it. So a `Stream` has threads that wait, and while they do they hold no lock of
Python's. Other backends (NCCL, RCCL) have streams of their own; there a collective is queued at once, by its caller.

No rank can wait for another in a circle: a collective waits for messages of the same one on other ranks, and for
collectives that were started before it, in the order of the program, which is the same on all ranks.
"""

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from repro.comm.exchange import Round

_DRAIN_S = 10.0  # at the end of a process, for what is under way


class Pending(dist.Work):
    """A collective; `wait` returns its result, or raises what ended it, at every call (an ExchangeError if another rank
    is the reason). A stream takes it on; without one, `wait` does. The `timeout` of `wait` is ignored: that of the
    process group holds.

    behind   a collective of the same kind that goes first, round by round
    """

    def __init__(self, steps: Generator[Round, None, Any], behind: "Pending | None" = None) -> None:
        super().__init__()
        self._steps: Generator[Round, None, Any] | None = steps
        self._behind = behind
        self._taken = False
        self._rounds, self._ended = 0, False  # rounds that have arrived
        self._result: Any = None
        self._error: BaseException | None = None
        self._news = threading.Condition()

    def take_on(self) -> "Pending":
        """From now on somebody else calls `run`."""
        self._taken = True
        return self

    def run(self) -> None:
        """Take it to its end, which may be an exception: `wait` raises that."""
        assert self._steps is not None, "a collective runs once"
        result, error = None, None
        try:
            while True:
                if self._behind is not None:
                    self._behind._passed(self._rounds)
                next(self._steps).arrive()
                with self._news:
                    self._rounds += 1
                    self._news.notify_all()
        except StopIteration as end:
            result = end.value
        except BaseException as raised:
            error = raised
        self._steps = self._behind = None  # and all that they hold
        with self._news:
            self._result, self._error, self._ended = result, error, True
            self._news.notify_all()

    def _passed(self, rounds: int) -> None:
        """Wait until more than so many rounds have arrived, or it has ended."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._rounds > rounds)

    @property
    def failed(self) -> BaseException | None:
        """What ended it so far; None while it goes well."""
        return self._error

    def ended(self, timeout: float | None = None) -> bool:
        """Whether it has come to an end, after at most so many seconds."""
        with self._news:
            return self._news.wait_for(lambda: self._ended, timeout)

    def wait(self, timeout: object = None) -> Any:
        if not self._taken:
            self.take_on().run()
        self.ended()
        if self._error is not None:
            raise self._error
        return self._result


class Stream:
    """Collectives of one kind, in the order in which they were started: each starts a round of messages when the one
    before it has ended that round, and at most `most` run. Where a hop is one round (a direct exchange), bucket k is on
    the slow level while bucket k + 1 is on the fast one; on a ring they follow each other around it.

    inline   the backend has streams of its own: a collective is queued when it is started, by its caller
    """

    def __init__(self, most: int, inline: bool = False) -> None:
        self.most, self.inline = most, inline
        self._under_way: deque[Pending] = deque()
        self._last: Pending | None = None
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, _close, self._queue, most).atexit = False
        _streams.add(self)

    def start(self, steps: Generator[Round, None, Any]) -> Pending:
        """Start a collective. All ranks start the same ones in the same order."""
        if self.inline:
            pending = Pending(steps)
            pending.wait()
            return pending
        pending = Pending(steps, behind=None if self._last is None or self._last.ended(0) else self._last).take_on()
        self._forget_ended()
        self._under_way.append(pending)
        self._last = pending
        if len(self._threads) < min(self.most, len(self._under_way)):
            thread = threading.Thread(target=_work, args=(self._queue,), daemon=True, name="repro.comm")
            self._threads.append(thread)
            thread.start()
        self._queue.put(pending)
        return pending

    def make_room(self) -> None:
        """Wait until fewer than `most` are under way; raises what ended those that were waited for."""
        while len(self._under_way) >= self.most:
            self._under_way[0].wait()
            self._under_way.popleft()

    def finish(self) -> None:
        """Wait until none is under way; raises what ended one."""
        while self._under_way:
            self._under_way[0].wait()  # one that failed stays, and raises again
            self._under_way.popleft()

    def _forget_ended(self) -> None:
        while self._under_way and self._under_way[0].ended(0) and self._under_way[0].failed is None:
            self._under_way.popleft()

    def drain(self, until: float) -> None:
        """Wait for what is under way, however it ends, at most until then (`time.monotonic`)."""
        for pending in self._under_way:
            pending.ended(max(0.0, until - time.monotonic()))


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


@atexit.register
def _drain() -> None:
    """Others may wait for what this rank still has to send."""
    until = time.monotonic() + _DRAIN_S
    for stream in list(_streams):
        stream.drain(until)


def _work(pendings: "queue.SimpleQueue[Pending | None]") -> None:
    torch.set_grad_enabled(False)  # a setting of each thread
    while (pending := pendings.get()) is not None:
        pending.run()
        del pending  # and its result, while waiting for the next


def _close(pendings: "queue.SimpleQueue[Pending | None]", threads: int) -> None:
    for _ in range(threads):
        pendings.put(None)
