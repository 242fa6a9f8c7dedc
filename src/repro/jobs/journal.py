"""What an allocation is doing, in a file that outlives it: one that is killed cannot say which point it was running."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ValidationError

from repro import paths
from repro.files import replacing
from repro.jobs import causes, queue
from repro.plan import config
from repro.records import provenance, record
from repro.records.record import Cause, Record

LATE_FILES_S = 5.0
WHERE = "slurm/where"  # in a run's results: a folder for each step, for what its ranks tell


class Running(BaseModel):
    """The point that a job runs: `record` (relative to the root) is where its result will be, `replaces` the file that was
    there before (`file_of`), `log` what it prints."""

    record: str
    experiment: str
    point: dict[str, record.Scalar | None]
    repeat: int
    attempt: int
    since: AwareDatetime
    log: str
    replaces: str = ""


class Entry(BaseModel):
    """An allocation that has begun and not said that it is through. `job_id`: of Slurm, or `process-<pid>`."""

    job_id: str
    allocation: str
    nodes: str = ""
    running: Running | None = None


def folder(results: str) -> Path:
    """Where the entries of a run are, a file per job."""
    return paths.root() / results / "running"


def write(results: str, entry: Entry) -> None:
    """Put the entry in place of the one before."""
    with replacing(folder(results) / f"{entry.job_id}.json") as temporary:
        temporary.write_text(entry.model_dump_json(indent=1))


def remove(results: str, job_id: str) -> None:
    """The job is through."""
    (folder(results) / f"{job_id}.json").unlink(missing_ok=True)


def entries(results: str) -> list[Entry]:
    """All of them; a file that was cut short is left out, and removed."""
    found = []
    for file in sorted(folder(results).glob("*.json")):
        try:
            found.append(Entry.model_validate_json(file.read_bytes()))
        except OSError:  # gone, or put in place anew in this instant: some file systems cannot read it then
            continue
        except ValidationError:
            file.unlink(missing_ok=True)
    return found


def settle(results: str, entry: Entry, restarted: bool = False) -> Cause | None:
    """Record why the point that `entry` was running has no numbers, and drop the entry, with what its steps left; None
    where it had got its record. `restarted`: the same job has begun anew. QueueError where Slurm cannot tell; ValueError for a point that
    no experiment knows any more, or of an experiment that is gone."""
    cause = None
    if (running := entry.running) is not None and awaited(running) is None:
        log = paths.root() / running.log
        cause, detail = causes.of_job(queue.state(entry.job_id), log, restarted)
        failed(running, cause, detail, {"SLURM_JOB_ID": entry.job_id, "SLURM_JOB_NODELIST": entry.nodes})
    for left in (paths.root() / results / WHERE).glob(f"{entry.job_id}-*"):
        shutil.rmtree(left, ignore_errors=True)
    remove(results, entry.job_id)
    return cause


def file_of(name: str) -> str:
    """By what the file of a record is known; "" where there is none. Not by its time alone: clocks of hosts differ, and
    may be set back."""
    try:
        found = (paths.root() / name).stat()
    except OSError:
        return ""
    return f"{found.st_ino} {found.st_mtime_ns}"


def finished(running: Running) -> Record | None:
    """The record of this attempt or of a later one, where it is there."""
    try:
        found = record.read(paths.root() / running.record)
    except record.RecordError:
        return None
    return found if found.attempt >= running.attempt and file_of(running.record) != running.replaces else None


def awaited(running: Running, goes_on: Callable[[], bool] = lambda: True) -> Record | None:
    """`finished`, asked for a while, as long as `goes_on`: a shared file system may show other nodes' files a little
    later."""
    limit = time.monotonic() + LATE_FILES_S
    while (found := finished(running)) is None and goes_on() and time.monotonic() < limit:
        time.sleep(0.5)
    return found


def failed(running: Running, cause: Cause, detail: str, slurm: dict[str, str]) -> None:
    """Write the record of a point that could not write its own."""
    seed = config.point(running.experiment, running.point, running.record).seed
    source = provenance.collect(f"repro.experiments.{running.experiment}", running.since, ran_here=False)
    found = Record(
        **running.model_dump(include={"experiment", "point", "repeat", "attempt"}),
        seed=seed,
        status="failed",
        cause=cause,
        detail=detail,
        provenance=source.model_copy(update={"slurm": source.slurm | {k: v for k, v in slurm.items() if v}}),
    )
    record.write(found, paths.root() / running.record)
