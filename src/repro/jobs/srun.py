"""Points as steps of srun inside a Slurm job."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from repro import experiments, paths
from repro.experiments.common.ranks import Ranked
from repro.jobs import causes, journal, queue, runner
from repro.jobs.journal import Entry, Running
from repro.launch import joined, seats, watchdog
from repro.plan import jobs as plan
from repro.plan.config import Node, Platform, Slurm
from repro.plan.models import Job, Plan
from repro.plan.packing import Allocation
from repro.records import provenance, record
from repro.records.record import Cause

# Needed before the job's own end: late ranks report where they are, Slurm ends them, and the cause is written.
GRACE_S, MARGIN_S = 10.0, 7.0
ENDING_S = 300.0  # that a job whose node died may be COMPLETING
_PYTHON = "REPRO_PYTHON"  # an interpreter on the node's own disk; set by the site's environment


def command(job: Job, slurm: Slurm, node: Node) -> list[str]:
    """The command line that starts a point's ranks, up to the program. It says all of it: what a step inherits differs
    between sbatch, salloc and Snakemake's jobs."""
    in_node = job.tasks_per_node
    words = ["srun", "--kill-on-bad-exit=1", "--wait=0", f"--nodes={job.nodes}"]
    words.append("--distribution=block:block")  # by itself Slurm deals a node's ranks out to its sockets in turn
    words += slurm.step_options
    words += [f"--ntasks={job.nodes * in_node}", f"--ntasks-per-node={in_node}"]
    if in_node == 1:  # the whole node: the task may start ranks of its own
        words.append(f"--cpus-per-task={slurm.cores_per_rank * node.ranks}")
        return [*words, f"--gpus-per-node={node.ranks}", "--gpu-bind=none"]
    words.append(f"--cpus-per-task={slurm.cores_per_rank}")
    if in_node == node.ranks:
        return [*words, *slurm.rank_options]
    # Not all GPUs of a node: say which, or two ranks of different packages may get GPUs of one.
    taken = [package * node.gcds + gcd for package in range(job.packages) for gcd in range(in_node // job.packages)]
    numbers = ",".join(str(slurm.gpus[place] if slurm.gpus else place) for place in taken)
    return [*words, *(option.replace("{gpus}", numbers) for option in slurm.part_options)]


def has_gpus(job: Job, slurm: Slurm, node: Node) -> bool:
    """Whether a point must find a real GPU. Those of an emulated node are only names."""
    wanted = isinstance(job.point, Ranked) or getattr(job.point, "device", "cpu") == "cuda"
    asked = [f"--gres={slurm.gres}", *slurm.options, *command(job, slurm, node)]
    return wanted and not node.emulated and any(word.startswith(("--gpu", "--gres=gpu")) for word in asked)


class JobSteps:
    """Steps of this job. `entry`: what the journal says of it; `retried`: causes after which the first trial of an
    allocation leaves a point to the second. ValueError outside a job, and where another job runs the allocation."""

    retried = causes.OUTSIDE

    def __init__(self, found: Plan, allocation: Allocation, platform: Platform) -> None:
        if "SLURM_JOB_ID" not in os.environ:
            raise ValueError(
                f"allocation {allocation.name}: SLURM_JOB_ID is not set; "
                "it runs inside a job, which `snakemake --profile` submits"
            )
        assert platform.slurm is not None and platform.node is not None
        self.slurm, self.node = platform.slurm, platform.node
        self.plan, self.allocation = found, allocation
        self.job_id = os.environ["SLURM_JOB_ID"]
        if not self.job_id.isdecimal():
            raise ValueError(f"SLURM_JOB_ID: found {self.job_id!r}; allowed: the number of a job")
        self.facts = queue.facts(self.job_id)
        self.reserve_s = GRACE_S + queue.kill_wait_s() + MARGIN_S
        self.entry = Entry(job_id=self.job_id, allocation=allocation.name, nodes=self.facts.nodes)
        self.unreported: dict[str, Path] = {}  # records that the accounting has not yet been asked about, by step

    def __enter__(self) -> "JobSteps":
        """Record what became of jobs of the same allocation that died, and of this one before Slurm requeued it."""
        for entry in journal.entries(self.plan.results):
            if entry.allocation == self.allocation.name:
                again = entry.job_id == self.job_id
                spare_s = self._seconds_left() - 60 * self.allocation.expected
                if not again and not _over(entry.job_id, min(ENDING_S, spare_s)):
                    raise ValueError(f"allocation {entry.allocation}: job {entry.job_id} is running it")
                journal.settle(self.plan.results, entry, restarted=again)
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._report(patience_s=5)
            journal.remove(self.plan.results, self.job_id)

    def has_time(self, minutes: float) -> bool:
        """Whether so many minutes of a point are left, and its start."""
        return self._seconds_left() >= 60 * (minutes + self.slurm.start_minutes)

    def goes_on(self, cause: Cause | None) -> bool:
        """Whether another point can be started after one that ended so."""
        self._report(patience_s=0)
        if cause is not Cause.NODE_FAILURE or self._nodes_answer():
            return True
        print("the job's nodes do not all answer: it ends here", flush=True)
        return False

    def run(self, job: Job, running: Running, output: IO[str]) -> Cause | None:
        """One point, which prints to `output` and has a record afterwards. Cause of a failure."""
        limit = min(experiments.get(job.experiment).timeout_s, max(1.0, self._seconds_left()))
        with self._where() as folder:
            where = Path(folder)
            try:
                code = self._srun(job, running.attempt, limit, where, output)
            except SystemExit:
                self._tell_why_ended(job, running, where)
                raise
            return self._complete(job, running, code, where)

    def _seconds_left(self) -> float:
        return self.facts.ends_at.timestamp() - time.time() - self.reserve_s

    def _nodes_answer(self) -> bool:
        """Whether a task starts on each of the job's nodes."""
        nodes = f"{self.allocation.nodes}"
        command = ["srun", "--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
        command += [*self.slurm.step_options, "true"]
        try:
            return subprocess.run(command, timeout=60, capture_output=True).returncode == 0
        except subprocess.TimeoutExpired:
            return False

    def _tell_why_ended(self, job: Job, running: Running, where: Path) -> None:
        """Slurm ends the job: record why, where that is known already. Else the entry stays for the next reader."""
        told = causes.of_watchdogs(where, job.nodes * job.tasks_per_node)
        if told is None and (cause := causes.of_ending(queue.state(self.job_id))) is not None:
            told = cause, f"the job was ended while this ran\n{causes.tail(paths.root() / running.log)}"
        if told is not None and journal.finished(running) is None:
            journal.failed(running, *told, self._slurm())
            journal.remove(self.plan.results, self.job_id)

    def _srun(self, job: Job, attempt: int, limit: float, where: Path, output: IO[str]) -> int | None:
        """Exit code of the step; None when it was ended for its time."""
        program = [os.environ.get(_PYTHON, sys.executable), "-m", "repro", "run"]
        words = [*command(job, self.slurm, self.node), *program]
        arguments = plan.arguments(job.model_copy(update={"attempt": attempt}))
        words += [*arguments, "--record-failure", "--out", job.record]
        environment = os.environ | {
            watchdog.DEADLINE: str(time.time() + limit),
            watchdog.FOLDER: str(where),
            seats.IN_PACKAGE: str(self.node.gcds),
            joined.ALONE: str(int(job.ranks == 1 and isinstance(job.point, Ranked))),
            runner.NEEDS_GPU: str(int(has_gpus(job, self.slurm, self.node))),
        }
        step = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=paths.root(), start_new_session=True
        )
        try:
            return step.wait(limit + GRACE_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._end(step)

    def _end(self, step: "subprocess.Popen[Any]") -> None:
        """End srun and its ranks, if they have not ended. Ranks that ignore its signal would outlive srun."""
        if step.poll() is not None:
            return
        step.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(3.0)
        with contextlib.suppress(queue.QueueError):  # srun is ended all the same
            queue.kill_steps(self.job_id)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(5.0)
        step.kill()
        step.wait()

    def _complete(self, job: Job, running: Running, code: int | None, where: Path) -> Cause | None:
        """Take note of the step's record, or write the one that it could not write. Cause of a failure."""
        found = journal.awaited(running, lambda: code is not None and not any(where.iterdir()))
        if found is None:
            ranks = job.nodes * job.tasks_per_node
            cause, detail = causes.of_step(paths.root() / running.log, where, ranks, code)
            journal.failed(running, cause, detail, self._slurm())
            return cause
        step = found.provenance.slurm.get("SLURM_STEP_ID")
        if step is not None:
            self.unreported[step] = paths.root() / job.record
        return found.cause if found.status == "failed" else None

    def _report(self, patience_s: float) -> None:
        """Add to the records what the accounting knows of their steps; it learns of a step's end a little later."""
        deadline = time.monotonic() + patience_s
        while self.unreported and (known := queue.step_reports(self.job_id)) is not None:
            for step in self.unreported.keys() & known.keys():
                with contextlib.suppress(OSError, record.RecordError):  # it only adds
                    _add(self.unreported.pop(step), known[step])
            if time.monotonic() >= deadline:
                break
            time.sleep(0.5)

    def _slurm(self) -> dict[str, str]:
        return {name: os.environ.get(name, "") for name in provenance.SLURM} | {"SLURM_JOB_NODELIST": self.facts.nodes}

    def _where(self) -> "tempfile.TemporaryDirectory[str]":
        """A folder of this step that all nodes see, for what late ranks tell."""
        folder = paths.root() / self.plan.results / journal.WHERE
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=folder, prefix=f"{self.job_id}-", ignore_cleanup_errors=True)


def _over(job_id: str, patience_s: float) -> bool:
    """Whether a job has ended; one that is ending is waited for, as its nodes may take minutes to say so."""
    limit = time.monotonic() + patience_s
    while (found := queue.state(job_id)).state == "COMPLETING" and time.monotonic() < limit:
        time.sleep(5.0)
    return found.over


def _add(path: Path, slurm: dict[str, str]) -> None:
    """Put more of Slurm's words into a record; the series beside it stays."""
    found = record.read(path)
    source = found.provenance.model_copy(update={"slurm": found.provenance.slurm | slurm})
    record.write(found.model_copy(update={"provenance": source}), path)
