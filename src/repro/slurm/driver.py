"""The one who submits: one at a time, no jobs of a driver that was killed beside it, and a cause for every job that died."""

import fcntl
import sys
import time
from pathlib import Path
from typing import IO

from repro import paths
from repro.slurm import journal, queue

_COMMENT = "rule_allocation_wildcards_"  # the comment of our jobs begins so, and goes on with the run: Snakemake's plugin writes it
_PATIENCE_S = 60.0  # for cancelled jobs to be gone
_held: list[IO[str]] = []  # the lock lives as long as this process


class DriverError(RuntimeError):
    """Why nothing can be submitted from here now."""


def start(results: str) -> None:
    """Become the driver of a run: cancel what an earlier one left in the queue (nobody would hear of its end), and record why
    points of dead jobs have no numbers. DriverError while another one is at work."""
    file = paths.root() / results / "slurm" / "driver.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    _hold(file)
    if left := queue.jobs_of(paths.root(), f"{_COMMENT}{Path(results).name}_"):
        print(f"cancelling jobs that an earlier driver left in the queue: {', '.join(left)}", file=sys.stderr)
        queue.cancel(left)
        _wait_for(left)
    settle(results)


def settle(results: str) -> None:
    """Record why points of jobs that have ended have no numbers."""
    for entry in journal.entries(results):
        if queue.state(entry.job_id).over:
            cause = journal.settle(results, entry)
            if cause is not None and entry.running is not None:
                print(f"job {entry.job_id}: {cause} in {entry.running.record}", file=sys.stderr)


def _hold(file: Path) -> None:
    handle = file.open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DriverError(f"another snakemake drives these jobs ({file} is locked); wait for it, or end it") from None
    except OSError as error:  # a file system without locks
        print(
            f"{file}: no lock here ({error.strerror}); see yourself that no other snakemake drives these jobs",
            file=sys.stderr,
        )
    _held.append(handle)


def _wait_for(job_ids: list[str]) -> None:
    limit = time.monotonic() + _PATIENCE_S
    while time.monotonic() < limit and any(not queue.state(job_id).over for job_id in job_ids):
        time.sleep(1.0)
