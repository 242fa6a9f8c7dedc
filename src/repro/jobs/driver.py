"""The process that submits jobs. It is alone, cancels what a killed driver left, and finds a cause for every dead
job."""

import fcntl
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from repro import paths
from repro.jobs import journal, queue
from repro.plan.config import ConfigError

_COMMENT = "rule_allocation_wildcards_"  # begins the comment that Snakemake's plugin gives our jobs; the run follows
_PATIENCE_S = 120.0  # for cancelled jobs to be gone
_BEAT_S, _DEAD_S = 30.0, 300.0  # how often a driver shows that it lives, and when it is taken for dead
_PREEMPTED_S = 30.0  # a job that Slurm will run again is not PREEMPTED for longer
_held: list[tuple[IO[str], threading.Event]] = []  # locks, which live as long as this process, and what ends their beat


class DriverError(RuntimeError):
    """Why nothing can be submitted from here now."""


def start(results: str) -> None:
    """Become the driver of a run: cancel what an earlier one left in the queue (nobody would hear of its end), and
    record why points of dead jobs have no numbers. DriverError while another one is at work, or its jobs do not end;
    QueueError where Slurm cannot tell."""
    _hold(paths.root() / results / "slurm/driver.json")
    if left := queue.jobs_of(paths.root(), f"{_COMMENT}{Path(results).name}_"):
        print(f"cancelling jobs that an earlier driver left in the queue: {', '.join(left)}", file=sys.stderr)
        queue.cancel(left)
        _wait_for(left)
    settle(results)
    hear_of_preemption()


def settle(results: str) -> None:
    """Record why points of jobs that have ended have no numbers. What Slurm cannot tell now is left for later."""
    for entry in journal.entries(results):
        try:
            if not queue.state(entry.job_id).over:
                continue
            cause = journal.settle(results, entry)
        except (queue.QueueError, ConfigError) as error:
            print(f"job {entry.job_id}: {error}", file=sys.stderr)
            continue
        if cause is not None and entry.running is not None:
            print(f"job {entry.job_id}: {cause} in {entry.running.record}", file=sys.stderr)


def hear_of_preemption() -> None:
    """Make Snakemake's plugin take a job that stays PREEMPTED for ended, as Slurm does where it does not run such jobs
    again. By itself it waits for it for ever (2.8.0)."""
    import snakemake_executor_plugin_slurm as plugin

    ask, since = plugin.query_job_status, dict[str, float]()

    async def ask_again(*arguments: Any, **options: Any) -> Any:
        states, seconds = await ask(*arguments, **options)
        for job_id, state in (states or {}).items():
            if not state.startswith("PREEMPTED"):
                since.pop(job_id, None)
            elif time.monotonic() - since.setdefault(job_id, time.monotonic()) >= _PREEMPTED_S:
                states[job_id] = "CANCELLED"
        return states, seconds

    plugin.query_job_status = ask_again


def _hold(file: Path) -> None:
    """Lock the file, and say in it who holds it: locks do not reach other hosts on every file system."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = file.open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DriverError(f"another snakemake drives these jobs ({file} is locked); wait for it, or end it") from None
    except OSError:  # a file system without locks: what the file says has to do
        pass
    handle.seek(0)
    try:
        holder = json.loads(handle.read() or "{}")
    except ValueError:
        holder = {}
    elsewhere = holder.get("host") not in (None, socket.gethostname())
    if elsewhere and time.time() - file.stat().st_mtime < _DEAD_S:
        raise DriverError(
            f"another snakemake drives these jobs, process {holder['pid']} on {holder['host']} ({file}); "
            f"wait for it or end it. If it is dead: {_DEAD_S:.0f} s after its end, or remove the file"
        )
    handle.truncate(0)
    handle.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
    handle.flush()
    ended = threading.Event()
    _held.append((handle, ended))
    threading.Thread(target=_beat, args=(file, ended), daemon=True).start()


def _beat(file: Path, ended: threading.Event) -> None:
    while not ended.wait(_BEAT_S):
        file.touch()


def release() -> None:
    """Let the next driver start at once, from any host."""
    while _held:
        handle, ended = _held.pop()
        ended.set()
        handle.truncate(0)
        handle.close()


def _wait_for(job_ids: list[str]) -> None:
    limit = time.monotonic() + _PATIENCE_S
    while alive := [job_id for job_id in job_ids if not queue.state(job_id).over]:
        if time.monotonic() > limit:
            raise DriverError(
                f"jobs {', '.join(alive)} were cancelled and have not ended yet; "
                "start again when `squeue` shows them no more"
            )
        time.sleep(1.0)
