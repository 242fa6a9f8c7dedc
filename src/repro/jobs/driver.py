"""What runs beside a Snakemake that submits jobs. It holds the run's lock, cancels what an earlier Snakemake left in the
queue, and records why dead jobs have no numbers."""

import contextlib
import fcntl
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from repro import paths
from repro.jobs import journal, queue

_COMMENT = r"rule_\w+_wildcards_{}(_|$)"  # that Snakemake's plugin gives our jobs, of points and readers: {}, the run
_PATIENCE_S = 120.0  # for cancelled jobs to be gone
_BEAT_S, _DEAD_S = 30.0, 300.0  # how often a driver shows that it lives, and when it is taken for dead


class DriverError(OSError):
    """Why nothing can be submitted from here now."""


def drive(results: str, orders: IO[str]) -> None:
    """Drive a run until `orders` end, as they do when Snakemake closes them or is gone; a line of them asks for `settle`.
    Says "driving" on standard output when it begins. DriverError while another driver is at work, or where the jobs
    of an earlier one do not end; QueueError where Slurm cannot tell."""
    with driving(results), contextlib.suppress(BrokenPipeError):  # Snakemake was ended meanwhile
        print("driving", flush=True)
        for _ in orders:
            try:  # it may have been interrupted while it asked for their states, and have forgotten them
                _cancelled(results, "Snakemake has", ending=False)
            except queue.QueueError as error:
                print(error, file=sys.stderr)
            settle(results)


@contextlib.contextmanager
def driving(results: str) -> Iterator[None]:
    """Be the driver of a run: cancel what an earlier one left in the queue (nobody would hear of its end), and record why
    points of dead jobs have no numbers. DriverError and QueueError as of `drive`."""
    with _alone(paths.root() / results / "slurm/driver.json"):
        _wait_for(_cancelled(results, "an earlier driver"))
        settle(results)
        yield


def _cancelled(results: str, who: str, ending: bool = True) -> list[str]:
    """Jobs of the run that are in the queue, of which nobody would hear the end: they are cancelled."""
    left = queue.jobs_of(paths.root(), _COMMENT.format(re.escape(Path(results).name)), ending)
    if left:
        print(f"cancelling jobs that {who} left in the queue: {', '.join(left)}", file=sys.stderr)
        queue.cancel(left)
    return left


def settle(results: str) -> None:
    """Record why points of jobs that have ended have no numbers. What Slurm cannot tell now is left for later, and what is
    no point any more is dropped."""
    for entry in journal.entries(results):
        try:
            if not queue.state(entry.job_id).over:
                continue
            cause = journal.settle(results, entry)
        except queue.QueueError as error:
            print(f"job {entry.job_id}: {error}", file=sys.stderr)
            continue
        except ValueError as error:  # an experiment or a parameter that was renamed or removed
            print(f"job {entry.job_id}: {error}", file=sys.stderr)
            journal.remove(results, entry.job_id)
            continue
        if cause is not None and entry.running is not None:
            print(f"job {entry.job_id}: {cause} in {entry.running.record}", file=sys.stderr)


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Lock the file, and say in it who holds it: locks do not reach other hosts on every file system."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+") as handle:
        _take(handle, file)
        ended = threading.Event()
        threading.Thread(target=_beat, args=(file, ended), daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            handle.truncate(0)  # so that the next driver may start at once, from any host


def _take(handle: IO[str], file: Path) -> None:
    handle.seek(0)
    try:
        holder = json.loads(handle.read() or "{}")
    except ValueError:
        holder = {}
    alive = holder.get("host") not in (None, socket.gethostname())  # may be: it cannot be asked
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        whose = f"process {holder.get('pid')} on {holder.get('host')}; {file} is locked"
        raise DriverError(f"another snakemake drives these jobs ({whose}); wait for it, or end it") from None
    except OSError:  # a file system without locks: what the file says has to do
        alive = alive or psutil.pid_exists(holder.get("pid", -1))
    if alive and time.time() - file.stat().st_mtime < _DEAD_S:
        raise DriverError(
            f"another snakemake drives these jobs, process {holder['pid']} on {holder['host']} ({file}); "
            f"wait for it or end it. If it is dead, start again {_DEAD_S:.0f} s after its end, or remove the file"
        )
    handle.truncate(0)
    handle.write(json.dumps({"host": socket.gethostname(), "pid": os.getppid()}))  # Snakemake's, which one can end
    handle.flush()


def _beat(file: Path, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        with contextlib.suppress(OSError):  # a file system that is away for a moment
            file.touch()


def _wait_for(job_ids: list[str]) -> None:
    limit = time.monotonic() + _PATIENCE_S
    while alive := [job_id for job_id in job_ids if not queue.state(job_id).over]:
        if time.monotonic() > limit:
            raise DriverError(
                f"jobs {', '.join(alive)} were cancelled and have not ended yet; "
                "start again when `squeue` shows them no more"
            )
        time.sleep(1.0)
