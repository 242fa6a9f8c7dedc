"""Points as processes of this machine. On Linux each is a fork of one that has imported what they need, so it starts in
milliseconds, and what it leaks, breaks or allocates ends with it."""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

import psutil

from repro import experiments, paths
from repro.emulate import netns, owners
from repro.jobs import causes, journal, runner
from repro.jobs.journal import Entry, Running
from repro.launch import joined
from repro.plan.config import Platform
from repro.plan.models import Job, Plan
from repro.plan.packing import Allocation
from repro.records import provenance
from repro.records.record import Cause

# By which a process is asked to end, often with its whole group.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START_S = 10  # for a thread to begin
_AGAIN_S = 0.1
_forking = False
_END_S = 10.0  # for a point that was interrupted to end its ranks and remove its network


class Forks:
    """One process after the other. The methods do for them what those of `JobSteps` do for steps of srun."""

    retried: frozenset[Cause] = frozenset()

    def __init__(self, found: Plan, allocation: Allocation, platform: Platform) -> None:
        joined.refuse_other_place(None)
        self.results = found.results
        self.entry = Entry(job_id=f"process-{os.getpid()}", allocation=allocation.name)
        # After a fork, macOS kills processes that use its frameworks.
        self.context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self.ended: BaseException | None = None

    def __enter__(self) -> "Forks":
        for entry in journal.entries(self.results):  # what a killed one has left
            kind, _, pid = entry.job_id.partition("process-")
            if not kind and pid.isdecimal() and not psutil.pid_exists(int(pid)):
                journal.remove(self.results, entry.job_id)
        self.before = {number: signal.signal(number, self._end) for number in heeded()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        journal.remove(self.results, self.entry.job_id)

    def _end(self, number: int, frame: object) -> None:
        """Somebody asks this process to end. It is also remembered: Python drops what is raised while it forks, and an
        extension module that is being imported makes an ImportError of it."""
        self.ended = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
        raise self.ended

    def _heed(self) -> None:
        if self.ended:
            raise self.ended

    def has_time(self, minutes: float) -> bool:
        return True

    def goes_on(self, cause: Cause | None) -> bool:
        return True

    def run(self, job: Job, running: Running, output: IO[str]) -> Cause | None:
        if self.context.get_start_method() == "fork":
            _prepare(job)
        self._heed()
        lifeline, held = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_point, args=(job, running.attempt, running.log, lifeline, held))
        process.start()
        lifeline.close()
        try:
            self._heed()  # what came in the fork itself reached this process alone
            process.join()
        finally:
            held.close()  # interrupts it, where it has not ended and Ctrl-C has not reached it
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        found = journal.finished(running)
        self._heed()
        if found is None:
            cause, detail = causes.of_process(process.exitcode or 0, paths.root() / running.log)
            journal.failed(running, cause, detail, {})
            return cause
        return found.cause if found.status == "failed" else None


def _prepare(job: Job) -> None:
    """What every point of the experiment would import, load and find out anew."""
    experiment = experiments.get(job.experiment)
    with contextlib.suppress(Exception):  # the point says it better, in its record
        experiment.prepare(job.point)
    provenance.source_hash(experiment.parameters.__module__)
    provenance.commit(paths.root())


def _point(job: Job, attempt: int, log: str, lifeline: Connection, held: Connection) -> None:
    """Main function of a point's process."""
    held.close()
    _tell_forks()
    for number in heeded():
        signal.signal(number, _interrupted_once)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_START_S)  # a thread without memory never says that it began, and who started it would wait for ever
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    signal.alarm(0)
    with (paths.root() / log).open("a") as output:
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            os.dup2(output.fileno(), number)
    try:
        runner.run(job.experiment, job.point, job.repeat, attempt, paths.root() / job.record)
    finally:
        for left in owners.mine():  # an interrupt may have come while it was taken down
            netns.remove(left)


def heeded() -> tuple[signal.Signals, ...]:
    """Those of `ENDING` that this process does not ignore, as SIGHUP is behind nohup; SIGINT in any case."""
    return tuple(n for n in ENDING if n == signal.SIGINT or signal.getsignal(n) is not signal.SIG_IGN)


@contextlib.contextmanager
def handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Signals are handled so while the block runs, and afterwards as before."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted_once(number: int, frame: object) -> None:
    """Ctrl-C comes from the terminal and from the process that started this one: the second must not end the cleaning up.
    Python drops what is raised while it forks, as a point does that starts ranks; then it comes once more."""
    if _forking:
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()
        return
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _tell_forks() -> None:
    """From here on `_forking` says whether this process forks. What it forks, ranks say, ends as any process does."""

    def set_to(now: bool) -> None:
        global _forking
        _forking = now

    def in_child() -> None:
        set_to(False)
        for number in heeded():
            if number != signal.SIGINT:
                signal.signal(number, signal.SIG_DFL)

    before, after = functools.partial(set_to, True), functools.partial(set_to, False)
    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _watch(lifeline: Connection) -> None:
    """Interrupt this process when the one that started it is gone."""
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(_END_S)
    os._exit(1)
