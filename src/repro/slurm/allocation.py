"""Inside a Slurm job: run the points of its allocation, each as a step of srun, and leave a record of each whatever happens."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from repro import experiments, paths, plan, provenance, record
from repro.config import Node, Platform, Slurm
from repro.launch import watchdog
from repro.plan import Job, Plan
from repro.record import Cause
from repro.slurm import causes, journal, queue
from repro.slurm.journal import Entry, Running
from repro.slurm.packing import Allocation

RESERVE_S = 20.0  # before the job's own end: to say why, and where the ranks were
GRACE_S = 15.0  # for late ranks to tell, before the step is ended
_PYTHON = "REPRO_PYTHON"  # an interpreter on the node's own disk; set by the site's environment


class Ended(BaseException):
    """Slurm asked the job to end."""


def run(found: Plan, allocation: Allocation, platform: Platform) -> list[str]:
    """Run what is not done; the records that are still missing, because the job's time is over. ValueError outside a job of Slurm, QueueError
    where it does not answer."""
    if "SLURM_JOB_ID" not in os.environ:
        raise ValueError(
            f"allocation {allocation.name}: SLURM_JOB_ID is not set; it runs inside a job, which `snakemake --profile` submits"
        )
    return _Job(found, allocation, platform).run()


def srun(job: Job, slurm: Slurm, node: Node) -> list[str]:
    """The command line that starts a point's ranks, up to the program. It says all of it: what a step inherits differs between
    sbatch, salloc and Snakemake's jobs."""
    in_node, gpus = job.tasks_per_node, node.ranks
    cores = slurm.cores_per_rank * (gpus if in_node == 1 else 1)
    words = ["srun", "--kill-on-bad-exit=1", "--wait=0", f"--nodes={job.nodes}", f"--ntasks={job.nodes * in_node}"]
    words += [f"--ntasks-per-node={in_node}", f"--cpus-per-task={cores}"]
    if in_node == node.ranks:
        return [*words, *slurm.rank_options]
    # Not all GCDs of a node: say which, or two ranks of different packages may get GCDs of one.
    taken = [package * node.gcds + gcd for package in range(job.packages) for gcd in range(in_node // job.packages)]
    bind = f"--gpu-bind=map_gpu:{','.join(map(str, taken))}" if in_node > 1 else "--gpu-bind=none"
    return [*words, f"--gpus-per-node={gpus}", bind]


class _Job:
    """This job, and the state of its work."""

    def __init__(self, found: Plan, allocation: Allocation, platform: Platform) -> None:
        assert (
            platform.slurm is not None and platform.node is not None
        )  # a plan has allocations only where there is Slurm
        self.slurm, self.node = platform.slurm, platform.node
        self.plan, self.allocation = found, allocation
        self.job_id = os.environ["SLURM_JOB_ID"]
        self.ends_at = queue.ends_at(self.job_id).timestamp()
        self.entry = Entry(
            job_id=self.job_id,
            allocation=allocation.name,
            restarts=queue.restarts(self.job_id),
            nodes=queue.nodes(self.job_id),
        )
        self.unreported: dict[str, Path] = {}  # records that the accounting has not yet been asked about, by step

    def run(self) -> list[str]:
        """Records that are missing at the end."""
        self._settle_earlier()
        jobs = {job.record: job for job in self.plan.jobs}
        missing = []
        with _ends_politely():
            for number, name in enumerate(self.allocation.jobs, start=1):
                job = jobs[name]
                if (attempt := _attempt(job)) is None:
                    continue
                if self._seconds_left() < 60 * job.minutes:
                    missing.append(name)
                    continue
                print(f"{number}/{len(self.allocation.jobs)} {name}", flush=True)
                self._step(job, attempt)
                self._report(patience_s=0)
            self._report(patience_s=5)
        journal.remove(self.plan.results, self.job_id)
        return missing

    def _settle_earlier(self) -> None:
        """Jobs of the same allocation that died, and this one before Slurm put it back into the queue."""
        for entry in journal.entries(self.plan.results):
            if entry.allocation == self.allocation.name:
                journal.settle(self.plan.results, entry, restarted=entry.job_id == self.job_id)

    def _seconds_left(self) -> float:
        return self.ends_at - time.time() - RESERVE_S

    def _step(self, job: Job, attempt: int) -> None:
        """One point: its record is there afterwards, its own or one that says why not."""
        log = f"{self.plan.results}/logs/{job.experiment}/{Path(job.record).stem}.log"
        running = Running(
            **job.model_dump(include={"record", "experiment", "point", "repeat"}),
            attempt=attempt,
            since=provenance.now() - timedelta(milliseconds=1),
            log=log,
        )
        journal.write(self.plan.results, self.entry.model_copy(update={"running": running}))
        limit = min(experiments.get(job.experiment).timeout_s, self._seconds_left())
        with self._where() as where:
            try:
                code = self._srun(job, attempt, limit, where, paths.root() / log)
            except Ended:
                cause, detail = causes.of_job(queue.state(self.job_id), paths.root() / log, restarted=False)
                if journal.finished(running) is None:
                    journal.failed(running, cause, detail, self._slurm())
                raise
            self._complete(job, running, code, where)

    def _srun(self, job: Job, attempt: int, limit: float, where: Path, log: Path) -> int | None:
        """Exit code of the step; None when it was ended for its time."""
        program = [os.environ.get(_PYTHON, sys.executable), "-m", "repro", "run"]
        command = [*srun(job, self.slurm, self.node), *program]
        command += [
            *plan.arguments(job.model_copy(update={"attempt": attempt})),
            "--record-failure",
            "--out",
            job.record,
        ]
        environment = os.environ | {
            watchdog.DEADLINE: str(time.time() + limit),
            watchdog.FOLDER: str(where),
            "REPRO_GCDS_PER_PACKAGE": str(self.node.gcds),
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            step = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=paths.root(),
                start_new_session=True,
            )
            try:
                return step.wait(limit + GRACE_S)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(step)

    def _complete(self, job: Job, running: Running, code: int | None, where: Path) -> None:
        """Add what Slurm knows to the step's record, or write the one that it could not write."""
        found = journal.finished(running)
        if found is None:
            ranks = job.nodes * job.tasks_per_node
            cause, detail = causes.of_step(paths.root() / running.log, where, ranks, code is None, code)
            if cause is Cause.UNEXPECTED and not queue.state(self.job_id).state.startswith("RUNNING"):
                time.sleep(1.0)  # the job is being ended: SIGTERM follows, and its cause is the better one
            journal.failed(running, cause, detail, self._slurm())
            return
        step = found.provenance.slurm.get("SLURM_STEP_ID")
        if step is not None:
            self.unreported[step] = paths.root() / job.record

    def _report(self, patience_s: float) -> None:
        """Add to the records what the accounting knows of their steps; it learns of a step's end a little later."""
        deadline = time.monotonic() + patience_s
        while self.unreported and (known := queue.step_reports(self.job_id)) is not None:
            for step in self.unreported.keys() & known.keys():
                _add(self.unreported.pop(step), known[step])
            if time.monotonic() >= deadline:
                break
            time.sleep(0.5)

    def _slurm(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in provenance.SLURM} | {"SLURM_JOB_NODELIST": self.entry.nodes}

    @contextlib.contextmanager
    def _where(self) -> Iterator[Path]:
        """A folder that all nodes see, for what late ranks tell."""
        folder = paths.root() / self.plan.results / "slurm" / "where" / self.job_id
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _add(path: Path, slurm: dict[str, str]) -> None:
    """Put more of Slurm's words into a record."""
    found = record.read(path)
    source = found.provenance.model_copy(update={"slurm": found.provenance.slurm | slurm})
    with record.replacing(path) as temporary:  # not `record.write`: the series beside it stays
        temporary.write_text(found.model_copy(update={"provenance": source}).model_dump_json(indent=1) + "\n")


def _attempt(job: Job) -> int | None:
    """Number of the attempt to make now; None when the point has its record: an earlier try of this job may have made it."""
    state, following = plan.state(
        paths.root() / job.record, provenance.source_hash(f"repro.experiments.{job.experiment}")
    )
    if state in ("done", "skipped"):
        return None
    if state == "failed" and following > job.attempt:
        cause = record.read(paths.root() / job.record).cause
        return following if cause in causes.OUTSIDE else None
    return max(job.attempt, following)


def _end(step: "subprocess.Popen[Any]") -> None:
    """End srun, and with it the ranks, if it has not ended: it passes SIGTERM on, and a second one makes it leave."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if step.poll() is not None:
            return
        step.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(3.0)


@contextlib.contextmanager
def _ends_politely() -> Iterator[None]:
    """Turn SIGTERM into `Ended`: of scancel, of preemption, and of a time limit."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
