"""Run the points of an allocation one after the other, and leave a record of each: by srun inside a Slurm job, as forks
of this process elsewhere."""

import contextlib
import fcntl
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Protocol

from repro import paths
from repro.jobs import causes, journal
from repro.jobs.ending import politely
from repro.jobs.journal import Entry, Running
from repro.plan import jobs as plan
from repro.plan.config import Platform
from repro.plan.jobs import Job, Plan
from repro.plan.packing import Allocation
from repro.records import provenance, record
from repro.records.record import Cause


class Steps(Protocol):
    """Starts the ranks of points, and watches them.

    entry     what the journal says of this process
    retried   causes after which the first trial of an allocation leaves a point to the second
    """

    entry: Entry
    retried: frozenset[Cause]

    def __enter__(self) -> "Steps": ...

    def __exit__(self, *error: object) -> None: ...

    def has_time(self, minutes: float) -> bool:
        """Whether so many minutes are left."""

    def run(self, job: Job, running: Running, output: IO[str]) -> Cause | None:
        """One point, which prints to `output`. It has a record afterwards. Cause of a failure."""

    def goes_on(self, cause: Cause | None) -> bool:
        """Whether another point can be started after that."""


def run(found: Plan, allocation: Allocation, platform: Platform, trial: int = 1) -> list[str]:
    """Run unfinished points; return those the next trial must make: no time was left, or the first trial saw them fail
    from outside. ValueError outside a job of Slurm where the platform asks for one, and where another job runs the
    allocation; QueueError where Slurm cannot tell."""
    jobs = {job.record: job for job in found.jobs}
    missing, begun = [], False
    with politely(), _steps(found, allocation, platform) as steps:
        for number, name in enumerate(allocation.jobs, start=1):
            job = jobs[name]
            with _alone(found, job) as output:
                if (attempt := _attempt(job, found.made)) is None:
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
                missing += allocation.jobs[number:]
                break
    journal.remove(found.results, steps.entry.job_id)
    return missing


def _steps(found: Plan, allocation: Allocation, platform: Platform) -> Steps:
    if platform.slurm is None:
        from repro.jobs.forks import Forks

        return Forks(found, allocation)
    from repro.jobs.srun import JobSteps

    return JobSteps(found, allocation, platform)


@contextlib.contextmanager
def _alone(found: Plan, job: Job) -> Iterator[IO[str]]:
    """The log of a point, locked: of two drivers one runs it, and the other waits and finds the record."""
    log = paths.root() / found.results / "logs" / job.experiment / f"{Path(job.record).stem}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: the point may run twice, the last record stays
            fcntl.flock(output, fcntl.LOCK_EX)
        yield output


def _running(job: Job, attempt: int, log: Path) -> Running:
    return Running(
        **job.model_dump(include={"record", "experiment", "point", "repeat"}),
        attempt=attempt,
        since=provenance.now() - timedelta(milliseconds=1),
        log=str(log.relative_to(paths.root())),
    )


def _attempt(job: Job, planned: datetime) -> int | None:
    """Number of the attempt to make now; None when the point has its record, perhaps of another driver."""
    path = paths.root() / job.record
    state, following = plan.state(path, provenance.source_hash(f"repro.experiments.{job.experiment}"))
    if state in ("done", "skipped"):
        return None
    if state == "failed":
        found = record.read(path)
        since_planned = found.provenance.start >= planned
        return None if since_planned and found.cause not in causes.OUTSIDE else following
    return max(job.attempt, following)
