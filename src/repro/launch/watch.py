"""The parent's watch over its ranks: it waits for results, finds the true cause of a failure, and ends all."""

import contextlib
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

from repro.launch.errors import CollectiveHang, RankError, late
from repro.launch.rank import ERROR, RESULT, WHERE, Setup, parent_ends, run_rank
from repro.launch.where import SILENT_S

_ANSWER_S = 1.0  # patience for the answer to "where are you"; a rank that holds the GIL in native code gives none
_CAUSE_S = 1.0  # patience for the cause when ranks only report that a neighbour's connection broke or was silent
_EXIT_S = 2.0  # patience for a released rank to end by itself
_LOOK_S = 30.0  # between looks for dead ranks: a process that one has forked keeps open what would tell


class Ranks:
    """The processes of one launch, seen from the parent."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.deadline = setup, time.monotonic() + setup.timeout_s
        self.processes: list[Any] = []
        self.controls: list[Connection] = []
        self.results: dict[int, Any] = {}
        self.errors: dict[int, RankError] = {}
        self.answers: dict[int, tuple[str, bool]] = {}
        # A signal may end `stop` halfway. A process that then exits would wait for ranks that wait for it.
        self.at_exit = Finalize(None, self.stop, exitpriority=0)

    def start(self, fn: Callable[..., Any], args: tuple) -> None:
        """Fork or spawn a process per rank."""
        context = _context(self.setup.threads)
        self.told, self.telling = context.Pipe(duplex=False)  # kept open here too: its end of file means nothing
        for rank in range(self.setup.world_size):
            reader, control = context.Pipe(duplex=False)
            parent_ends.add(control)
            self.controls.append(control)
            process = context.Process(target=run_rank, args=(rank, self.setup, fn, args, reader, self.telling))
            process.start()
            reader.close()
            self.processes.append(process)

    def unreported(self) -> list[int]:
        """Ranks with neither a result nor an error yet."""
        return [rank for rank in range(len(self.processes)) if rank not in self.results and rank not in self.errors]

    def wait(self) -> list[Any]:
        """Results in rank order when every rank has one; raise the first real cause otherwise."""
        limit = self.deadline
        while self.unreported():
            if not self._listen(limit):
                break
            for error in self.errors.values():
                if "gloo/transport" not in error.traceback:
                    raise self._final(error)
            if self.errors and limit == self.deadline:  # only of neighbours gone or silent: let the cause show up
                limit = min(self.deadline, time.monotonic() + _CAUSE_S)
        for error in self.errors.values():
            if "Timed out waiting" in error.traceback:
                raise CollectiveHang(f"rank {error.rank}: {error.message}", {error.rank: error.traceback})
            raise self._final(error)
        if self.unreported():
            self._ask_where()
        return [self.results[rank] for rank in range(self.setup.world_size)]

    def _listen(self, limit: float) -> bool:
        """Take in what the ranks tell until `limit`; False when nothing came. RankError when a rank died."""
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        dead: list[int] = []
        while not (ready := wait([self.told, *sentinels], max(0.0, min(_LOOK_S, limit - time.monotonic())))):
            dead = [rank for rank, process in enumerate(self.processes) if process.exitcode is not None]
            if dead or time.monotonic() >= limit:
                break
        dead += sorted(sentinels[end] for end in set(ready) & sentinels.keys())
        while self.told.poll():
            self._take_in(*self.told.recv())
        for rank in dead:
            raise self._final(self.errors.get(rank) or RankError(rank))
        return bool(ready)

    def _take_in(self, kind: str, rank: int) -> None:
        """What a rank has left. RankError where it cannot be unpickled, as a class may allow only one way."""
        content = (self.setup.folder / f"{kind}-{rank}").read_bytes()
        try:
            found = pickle.loads(content)
        except Exception as error:
            message = f"its {kind} was pickled, but cannot be unpickled: {error}"
            raise self._final(RankError(rank, type(error).__name__, message)) from error
        {RESULT: self.results, ERROR: self.errors, WHERE: self.answers}[kind][rank] = found

    def _final(self, error: RankError) -> RankError:
        """The error with its process's fate, after all ranks were stopped. A rank that raised ends with exit code 1."""
        self.stop()
        error.exit_code = code = self.processes[error.rank].exitcode
        error.signal = -code if code is not None and code < 0 and not error.type_name else None
        return error

    def _ask_where(self) -> None:
        """The deadline passed: `late` by what ranks answer, unless all get done; RankError when one dies or raises."""
        time.sleep(SILENT_S)  # a rank that has only just entered a collective is not stuck there
        limit = time.monotonic() + _ANSWER_S
        for rank in self.unreported():
            with contextlib.suppress(OSError):  # died just now: `_listen` says so
                self.controls[rank].send_bytes(b"?")
        while any(rank not in self.answers for rank in self.unreported()) and self._listen(limit):
            pass
        for error in self.errors.values():
            raise self._final(error)
        nowhere = "  no answer: busy in native code\n", False
        if answers := {rank: self.answers.get(rank, nowhere) for rank in self.unreported()}:
            raise late(answers, self.setup.world_size, self.setup.timeout_s)

    def stop(self) -> None:
        """End every rank: those that reported leave by themselves, the others are killed."""
        for rank in self.unreported():
            self.processes[rank].kill()
        for control in self.controls:
            control.close()
            parent_ends.discard(control)
        limit = time.monotonic() + _EXIT_S
        for process in self.processes:
            process.join(max(0.0, limit - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self.at_exit.cancel()


def _context(threads: int) -> Any:
    """How to start ranks: by fork where that is safe (see the package)."""
    import torch.distributed  # before the fork, so that ranks share it

    forks = sys.platform == "linux" and threads == 1 and not torch.cuda.is_initialized()
    return multiprocessing.get_context("fork" if forks else "spawn")
