"""A Slurm job of points, as the profiles submit it, and what can be seen of it from outside."""

import contextlib
import sys
import time
from pathlib import Path

import psutil
from slurm_box import own, slurm

from repro.box import network
from repro.jobs import driver, queue
from repro.plan import config, packing
from repro.plan import jobs as plan
from repro.records import record

QUICK = ("flover_queue", {"requests": 2, "seeds": 2})
SECONDS = ("moe_train", {"iterations": 500, "layers": 2, "hidden": 32})


class Job:
    """A job of the given points, submitted as Snakemake's plugin would: an allocation, run in a batch script."""

    def __init__(self, case, *points, minutes=30, options=(), variables=""):
        self.case, self.points = case, points
        self.folder = f"results/{case}"
        _settings, self.platform = config.load("smoke", "box")
        jobs = []
        for name, values in points:
            (job,) = plan._jobs(name, config.Grid(grid=values), self.folder, {}, "test")
            jobs.append(job)
        (self.allocation,) = packing.pack(
            [job.model_copy(update={"experiment": "test", "nodes": jobs[0].nodes}) for job in jobs],
            self.platform.slurm.model_copy(update={"pack_minutes": 1000}),
        )
        found = plan.make("smoke", "box")
        found = found.model_copy(update={"results": self.folder, "jobs": jobs})
        found.allocations = [self.allocation]
        self.records = [Path(job.record) for job in jobs]
        Path(self.folder).mkdir()
        file = Path(self.folder, "plan.json")
        file.write_text(found.model_dump_json())
        # A measuring lock of its own: these jobs may disturb each other.
        temporary = Path(self.folder, "tmp").absolute()
        temporary.mkdir()
        script = f"#!/bin/sh\nexport GLOO_SOCKET_IFNAME=hsn0 TMPDIR={temporary} {variables}\n"
        script += f"exec {sys.executable} -m repro allocation {file.absolute()} {self.allocation.name} --out {self.folder}/done.json\n"
        Path(self.folder, "job.sh").write_text(script)
        nodes = jobs[0].nodes
        command = ["sbatch", "--parsable", f"--nodes={nodes}", "--exclusive", "--gpus-per-node=8", f"--time={minutes}"]
        command += [f"--output={self.folder}/job.log", f"--comment=rule_allocation_wildcards_{case}_x", *options]
        self.id = slurm(*command, f"{self.folder}/job.sh").strip()

    @property
    def state(self):
        return queue.state(self.id)

    def wait(self, until, seconds, what):
        deadline = time.monotonic() + seconds
        while not until():
            log = Path(self.folder, "job.log")
            assert time.monotonic() < deadline, (what, self.state, log.read_text() if log.exists() else "no log")
            time.sleep(0.2)

    def runs(self, record_number=0):
        """The ranks of a point, once they are at work: several have met, a lone one has taken the time to import."""
        wanted = str(self.records[record_number])
        ranks = [rank for rank in self.processes() if wanted in _command(rank) and "srun" not in _command(rank)[:1]]
        return bool(ranks) and all(_has_met(rank) if len(ranks) > 1 else _seconds(rank) > 6 for rank in ranks) and ranks

    def processes(self):
        mark = f"SLURM_JOB_ID={self.id}"
        return [p for p in map(process, network.processes(own())) if p is not None and mark in environment(p)]

    def ended(self, seconds=60):
        """The end of the job, and of what the driver does about it; its records."""
        self.wait(lambda: self.state.over, seconds, "should have ended")
        driver.settle(self.folder)
        return [record.read(path) for path in self.records if path.exists()]


def process(pid):
    """None when it has ended."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def environment(process):
    """`NAME=value` of a process; empty when it has ended."""
    try:
        return {f"{key}={value}" for key, value in process.environ().items()}
    except psutil.Error:
        return set()


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _has_met(process):
    """Whether a rank has joined its process group: only then gloo starts these threads."""
    with contextlib.suppress(OSError):
        return "pt_gloo_runloop" in {
            task.read_text().strip() for task in Path(f"/proc/{process.pid}/task").glob("*/comm")
        }
    return False


def _seconds(process):
    try:
        return sum(process.cpu_times()[:2])
    except psutil.Error:
        return 0.0
