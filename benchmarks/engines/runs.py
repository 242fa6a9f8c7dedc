"""One run of one engine in a process of its own, kept in a file: a finished run is not done again, a failed one is."""

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from engines import models
from engines.catalogue import SCRIPTS, Engine
from engines.protocol import Job
from engines.workload import requests

from repro import paths
from repro.records import provenance


@dataclass(frozen=True)
class Cell:
    """What all engines are compared in."""

    model: str
    dtype: str
    interval_s: float

    def __str__(self) -> str:
        return f"{self.model} {self.dtype}, " + (f"every {self.interval_s:g} s" if self.interval_s else "burst")


@dataclass(frozen=True)
class Run:
    """Seconds and tokens of a run, or why there are none. `others`: share of the cores' time that other processes took
    meanwhile."""

    engine: str
    cell: Cell
    round: int
    failed: str = ""
    version: str = ""
    init_s: float = 0.0
    total_s: float = 0.0
    tokens_per_s: float = 0.0
    latency_mean_s: float = 0.0
    latency_p99_s: float = 0.0
    ttft_mean_s: float | None = None
    ttft_p99_s: float | None = None
    others: float = 0.0
    kept: bool = False  # from an earlier call of the benchmark
    answers: tuple[tuple[int, ...], ...] = ()

    def row(self) -> dict[str, Any]:
        """For the CSV."""
        found = asdict(self)
        del found["answers"]
        return found.pop("cell") | found


@dataclass(frozen=True)
class Bench:
    """Where runs are done and kept. `requests`: how many; `others`: a run in which other processes took more of the
    cores' time is not finished; `fresh`: do again what is finished."""

    cache: Path
    cores: Sequence[int]
    requests: int
    timeout_s: float
    device: str = "cpu"
    others: float = 1.0
    fresh: bool = False

    def run(self, engine: Engine, cell: Cell, round_: int) -> Run:
        if reason := engine.missing():
            return Run(engine.name, cell, round_, failed=reason)
        model, gguf = models.prepare(cell.model, cell.dtype, self.cache)
        asked = requests(cell.interval_s, self.requests)
        job = Job(str(model), str(gguf), cell.dtype, len(self.cores), engine.variant, asked, self.device)
        where = f"{len(self.cores)}-threads" if self.device == "cpu" else self.device
        folder = self.cache / "runs" / f"{self.requests}-requests-{where}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{cell.model}-{cell.dtype}-{cell.interval_s:g}-{engine.name}-{round_}"
        key = {"job": asdict(job), "code": code(engine)}
        done = folder / f"{name}.json"
        kept = json.loads(done.read_text()) if done.exists() and not self.fresh else {}
        if kept.get("key") == key and kept["others"] <= self.others:
            return summary(engine, cell, round_, job, kept, kept=True)
        done.unlink(missing_ok=True)
        result = self._process(engine, job, folder / name)
        if "failed" in result:
            return Run(engine.name, cell, round_, failed=result["failed"], others=result["others"])
        done.write_text(json.dumps(result | {"key": key}))
        return summary(engine, cell, round_, job, result)

    def _process(self, engine: Engine, job: Job, stem: Path) -> dict[str, Any]:
        """Its result, or `failed`; what it printed stays in a log beside the result."""
        asked, answer, log = (stem.parent / f"{stem.name}.{end}" for end in ("job", "result", "log"))
        job.write(asked)
        answer.unlink(missing_ok=True)
        command = [engine.python, str(SCRIPTS / engine.script), str(asked), str(answer)]
        before = busy()
        with log.open("w") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=engine.environment(self.cores, self.cache),
                start_new_session=True,
            )
            try:
                status = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        others = share_of_others(before, busy())
        if status == 0 and answer.exists():
            result = json.loads(answer.read_text()) | {"others": others}
            answer.unlink()
            return result
        return {"failed": reason(status, log, self.timeout_s), "others": others}


def code(engine: Engine) -> str:
    """Hash of what is run: script, protocol, and for our engine its sources."""
    files = [SCRIPTS / engine.script, SCRIPTS / "protocol.py", SCRIPTS / "catalogue.py"]
    if engine.script == "ours.py":
        for part in ("flover", "models", "baselines"):
            folder = paths.root() / "src" / "repro" / part
            files += sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return provenance.file_hash(*files)


def summary(engine: Engine, cell: Cell, round_: int, job: Job, result: dict[str, Any], kept: bool = False) -> Run:
    """The numbers of a finished run; all times count from a request's arrival."""
    arrival = {request.id: request.arrival_s for request in job.requests}
    answers = sorted(result["requests"], key=lambda answer: answer["id"])
    latency = [a["finish_s"] - arrival[a["id"]] for a in answers]
    first = [a["first_token_s"] - arrival[a["id"]] for a in answers if a["first_token_s"] is not None]
    total = max(a["finish_s"] for a in answers)
    return Run(
        engine.name,
        cell,
        round_,
        version=result["version"],
        init_s=result["init_s"],
        total_s=total,
        tokens_per_s=sum(len(a["tokens"]) for a in answers) / total,
        latency_mean_s=float(np.mean(latency)),
        latency_p99_s=float(np.percentile(latency, 99)),
        ttft_mean_s=float(np.mean(first)) if len(first) == len(answers) else None,
        ttft_p99_s=float(np.percentile(first, 99)) if len(first) == len(answers) else None,
        others=result["others"],
        kept=kept,
        answers=tuple(tuple(a["tokens"]) for a in answers),
    )


def reason(status: int | None, log: Path, timeout_s: float) -> str:
    """Why there is no result, in one line."""
    if status is None:
        return f"took more than {timeout_s:g} s ({log.name})"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{ending}: {lines[-1][:160] if lines else 'no output'} ({log.name})"


def busy() -> tuple[float, float, float]:
    """Now, and seconds of processor time so far: of the whole machine, of our finished processes."""
    machine = psutil.cpu_times()
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    return time.monotonic(), psutil.cpu_count() * time.monotonic() - idle, ours.ru_utime + ours.ru_stime


def share_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Of all cores' time between two readings."""
    wall, machine, ours = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, (machine - ours) / (wall * psutil.cpu_count()))
