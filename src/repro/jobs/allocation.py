"""Run the points of an allocation one after the other, and leave a record of each: by srun inside a Slurm job, as forks
of this process elsewhere."""

import contextlib
import fcntl
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from repro import paths
from repro.jobs import causes, journal
from repro.jobs.forks import Forks, handled
from repro.jobs.journal import Running
from repro.jobs.srun import JobSteps
from repro.plan import jobs as plan
from repro.plan.config import Platform
from repro.plan.models import Job, Plan
from repro.plan.packing import Allocation
from repro.records import provenance, record


def run(found: Plan, allocation: Allocation, platform: Platform, trial: int = 1) -> list[str]:
    """Run unfinished points; return those the next trial must make: no time was left, the job's nodes do not answer any
    more, or the first trial saw them fail from outside. ValueError outside a job of Slurm where the platform asks for
    one, as a rank of torchrun or srun where it does not, and where another job runs the allocation; QueueError where
    Slurm cannot tell."""
    jobs = {job.record: job for job in found.jobs}
    missing, begun = [], False
    here = platform.slurm is None
    kind: type[Forks | JobSteps] = Forks if here else JobSteps
    asked = {signal.SIGTERM: lambda number, frame: sys.exit(128 + number)}  # to end, by Slurm or Snakemake
    with handled(asked), kind(found, allocation, platform) as steps:
        for number, name in enumerate(allocation.jobs, start=1):
            job = jobs[name]
            with _alone(found, job) as output:
                if (attempt := _attempt(job, found.made, here)) is None:
                    continue
                if begun and not steps.has_time(job.minutes):
                    missing.append(name)
                    continue
                print(f"{number}/{len(allocation.jobs)} {name}", flush=True)
                output.truncate(0)
                running = _running(job, attempt, Path(output.name))
                journal.write(found.results, steps.entry.model_copy(update={"running": running}))
                cause, begun = steps.run(job, running, output), True
            if trial == 1 and cause in steps.retried:
                missing.append(name)
            if not steps.goes_on(cause):
                left = allocation.jobs[number:]
                missing += [each for each in left if _attempt(jobs[each], found.made, here) is not None]
                break
    return missing


@contextlib.contextmanager
def _alone(found: Plan, job: Job) -> Iterator[IO[str]]:
    """The log of a point, locked: of two drivers one runs it, and the other waits and finds the record."""
    log = paths.root() / found.results / "logs" / job.experiment / f"{Path(job.record).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        with contextlib.suppress(OSError):  # no locks on this file system: the point may run twice, one record stays
            fcntl.flock(output, fcntl.LOCK_EX)
        yield output


def _running(job: Job, attempt: int, log: Path) -> Running:
    return Running(
        **job.model_dump(include={"record", "experiment", "point", "repeat"}),
        attempt=attempt,
        since=provenance.now(),
        log=str(log.relative_to(paths.root())),
        replaces=journal.file_of(job.record),
    )


def _attempt(job: Job, planned: datetime, here: bool) -> int | None:
    """Number of the attempt to make now; None when the point has its record, perhaps of another driver. `here`: as of
    `plan.state`."""
    path = paths.root() / job.record
    state, following = plan.state(path, here)
    if state in ("done", "skipped"):
        return None
    if state == "failed":
        found = record.read(path)
        since_planned = found.provenance.start >= planned
        return None if since_planned and found.cause not in causes.OUTSIDE else following
    return max(job.attempt, following)
