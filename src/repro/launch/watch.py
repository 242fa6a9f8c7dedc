"""The parent's watch over its ranks: it waits for results, finds the true cause of a failure, and ends all."""

import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from repro.launch.errors import CollectiveHang, LaunchTimeout, RankError, listed
from repro.launch.messages import ERROR, RESULT, WHERE, hear
from repro.launch.rank import Setup, parent_ends, run_rank
from repro.launch.where import SILENT_S

_ANSWER_S = 1.0  # patience for the answer to "where are you"; a rank that holds the GIL in native code gives none
_CAUSE_S = 1.0  # patience for the cause when ranks only report that a neighbour's connection broke or was silent
_EXIT_S = 2.0  # patience for a released rank to end by itself


class Ranks:
    """The processes of one launch, seen from the parent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Any] = []
        self.controls: list[Connection] = []
        self.results: dict[int, Any] = {}
        self.errors: dict[int, RankError] = {}
        self.answers: dict[int, tuple[str, bool]] = {}

    def start(self, fn: Callable[..., Any], args: tuple, setup: Setup) -> None:
        """Fork or spawn a process per rank."""
        context = _context(setup.threads)
        self.told, self.telling = context.Pipe(duplex=False)  # kept open here too: its end of file means nothing
        for rank in range(setup.world_size):
            reader, control = context.Pipe(duplex=False)
            parent_ends.add(control)
            self.controls.append(control)
            process = context.Process(target=run_rank, args=(rank, setup, fn, args, reader, self.telling))
            process.start()
            reader.close()
            self.processes.append(process)

    def unreported(self) -> list[int]:
        """Ranks with neither a result nor an error yet."""
        return [rank for rank in range(len(self.processes)) if rank not in self.results and rank not in self.errors]

    def wait(self, deadline: float, timeout_s: float) -> None:
        """Return when every rank has a result; raise the first real cause otherwise."""
        limit = deadline
        while self.unreported():
            if not self._listen(limit):
                break
            for error in self.errors.values():
                if "gloo/transport" not in error.traceback:
                    raise self._final(error)
            if self.errors and limit == deadline:  # only of neighbours gone or silent: let the cause show up
                limit = min(deadline, time.monotonic() + _CAUSE_S)
        for error in self.errors.values():
            if "Timed out waiting" in error.traceback:
                raise CollectiveHang(f"rank {error.rank}: {error.message}", {error.rank: error.traceback})
            raise self._final(error)
        if self.unreported() and (late := self._late(timeout_s)):
            raise late

    def _listen(self, limit: float) -> bool:
        """Take in what the ranks tell until `limit`; False when nothing came. RankError when a rank died."""
        sentinels = {process.sentinel: rank for rank, process in enumerate(self.processes)}
        ready = wait([self.told, *sentinels], timeout=max(0.0, limit - time.monotonic()))
        while self.told.poll():
            kind, rank, content = hear(self.told, self.folder)
            {RESULT: self.results, ERROR: self.errors, WHERE: self.answers}[kind][rank] = content
        for rank in sorted(sentinels[dead] for dead in set(ready) & sentinels.keys()):
            raise self._final(self.errors.get(rank) or RankError(rank))
        return bool(ready)

    def _final(self, error: RankError) -> RankError:
        """The error with its process's fate, after all ranks were stopped. A rank that raised ends with exit code 1."""
        self.stop()
        code = self.processes[error.rank].exitcode
        killed = -code if code < 0 and not error.type_name else None
        return RankError(
            *(error.rank, error.type_name, error.message, error.traceback), code, killed, exception=error.exception
        )

    def _late(self, timeout_s: float) -> LaunchTimeout | None:
        """The deadline passed: ask the ranks where they are, and say whether they wait for each other.

        RankError when one dies or raises meanwhile; None when all get done after all.
        """
        time.sleep(SILENT_S)  # a rank that has only just entered a collective is not stuck there
        waiting, limit = self.unreported(), time.monotonic() + _ANSWER_S
        for rank in waiting:
            with contextlib.suppress(OSError):  # died just now: `_listen` says so
                self.controls[rank].send_bytes(b"?")
        while any(rank not in self.answers for rank in self.unreported()) and self._listen(limit):
            pass
        for error in self.errors.values():
            raise self._final(error)
        if not (waiting := self.unreported()):
            return None
        nowhere = "  no answer: busy in native code\n", False
        answers = {rank: self.answers.get(rank, nowhere) for rank in waiting}
        blocked = [rank for rank, (_, is_blocked) in answers.items() if is_blocked]
        message = f"{len(waiting)} of {len(self.processes)} ranks were not done after {timeout_s:g} s"
        message += f"; blocked in torch.distributed: {listed(blocked)}" if blocked else ""
        kind = CollectiveHang if blocked == waiting else LaunchTimeout
        return kind(message, {rank: stack for rank, (stack, _) in answers.items()})

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


def _context(threads: int) -> Any:
    """How to start ranks: by fork where that is safe (see the package)."""
    import torch.distributed  # before the fork, so that ranks share it

    forks = sys.platform == "linux" and threads == 1 and not torch.cuda.is_initialized()
    return multiprocessing.get_context("fork" if forks else "spawn")
