"""A late rank of a job says where it is, and ends: nobody else can ask it, as `launch` asks its own ranks."""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from types import CodeType

from repro.launch.errors import LaunchTimeout, late
from repro.launch.where import SILENT_S, where

DEADLINE, FOLDER = "REPRO_DEADLINE", "REPRO_WHERE"  # set by the job: seconds since 1970; where late ranks leave a file
EXIT_CODE = 124  # of a rank that was late, as of timeout(1)
_TOGETHER_S = 2.0  # the first rank to end makes srun kill the others, which must have told by then


def seconds_left(timeout_s: float) -> float:
    """`timeout_s`, or less where the job's deadline comes first; at least a millisecond. ValueError for a deadline that
    is no number."""
    try:
        deadline = float(os.environ.get(DEADLINE, "inf"))
    except ValueError as error:
        raise ValueError(f"the environment variable {DEADLINE}, allowed are seconds since 1970: {error}") from error
    return max(1e-3, min(timeout_s, deadline - time.time()))


@contextlib.contextmanager
def until(timeout_s: float, rank: int, outermost: CodeType) -> Iterator[None]:
    """End this process with EXIT_CODE when the block takes longer than `timeout_s`, or beyond the job's deadline. The
    stack that it tells begins inside the frame of `outermost`. ValueError for a deadline that is no number."""
    left, done = seconds_left(timeout_s), threading.Event()
    timer = threading.Timer(left, _tell_and_end, (rank, left, outermost, done))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        done.set()
        timer.cancel()


def _tell_and_end(rank: int, after_s: float, outermost: CodeType, done: threading.Event) -> None:
    if done.wait(SILENT_S):  # a rank that has only just entered a collective is not stuck there, and may get done
        return
    try:
        stack, blocked = where(outermost)
        told = json.dumps({"rank": rank, "after_s": after_s, "stack": stack, "blocked": blocked})
        _leave(rank, told)
        print(f"rank {rank} was not done after {after_s:.0f} s:\n{stack}", file=sys.stderr, flush=True)
        time.sleep(_TOGETHER_S)
    finally:  # also where nothing could be told: who waits for this rank would wait for ever
        os._exit(EXIT_CODE)


def _leave(rank: int, told: str) -> None:
    """In the job's folder, if it has one; where that is gone or its disk full, standard error alone tells."""
    if folder := os.environ.get(FOLDER):
        with contextlib.suppress(OSError):
            begun = Path(folder, f".rank-{rank}")
            begun.write_text(told)
            begun.rename(Path(folder, f"rank-{rank}.json"))


def cause(folder: Path, world_size: int) -> LaunchTimeout | None:
    """What late ranks left in `folder`: a CollectiveHang where all waited for others; None when none was late."""
    told = sorted((json.loads(file.read_text()) for file in folder.glob("rank-*.json")), key=itemgetter("rank"))
    ranks = {one["rank"]: (one["stack"], one["blocked"]) for one in told}
    return late(ranks, world_size, round(told[0]["after_s"])) if told else None
