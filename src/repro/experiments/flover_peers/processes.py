"""One pass of one engine over a list of requests, in processes of its own that end with it."""

import contextlib
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from repro.experiments.flover_peers.catalogue import SCRIPTS, Engine
from repro.experiments.flover_peers.engines import protocol
from repro.experiments.flover_peers.engines.protocol import Job, Result

_LAST_LINES = 12


class EngineFailed(RuntimeError):
    """An engine ended without a result, or with one that is none; the message has the last lines that it printed."""


def serve(engine: Engine, job: Job, cores: Sequence[int], cache: Path) -> Result:
    """What the engine says of the job, checked: every request has all its tokens, and none before it arrived.

    EngineFailed otherwise. There is no time limit here: when this is left by an exception, the engine is ended.
    """
    with tempfile.TemporaryDirectory(prefix="repro-peers-") as folder:
        asked, answered, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        job.write(asked)
        command = [engine.python, str(SCRIPTS / engine.script), str(asked), str(answered)]
        with log.open("w") as out, _started(command, out.fileno(), engine.environment(cores, cache)) as process:
            status = process.wait()
        if status:
            ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            raise EngineFailed(f"{engine.name} ended by {ending}{_said(log)}")
        try:
            return _checked(job, answered)
        except (OSError, ValueError) as error:
            raise EngineFailed(f"{engine.name} left no result that can be used: {error}{_said(log)}") from error


@contextlib.contextmanager
def _started(command: Sequence[str], output: int, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The engine in a group of processes, which are killed at the end. Its standard input is a pipe that ends when this
    process does, even by SIGKILL (`protocol._end_with_parent`)."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()


def _said(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join((", and printed" if lines else ", and printed nothing", *lines[-_LAST_LINES:]))


def _checked(job: Job, answered: Path) -> Result:
    """ValueError, or OSError, for what is no result."""
    result = TypeAdapter(Result).validate_json(answered.read_bytes(), strict=True)
    protocol.check(job.requests, result.requests)
    arrivals = {request.id: request.arrival_s for request in job.requests}
    for answer in result.requests:
        if not arrivals[answer.id] < answer.finish_s < float("inf"):
            raise ValueError(f"request {answer.id}: done after {answer.finish_s} s, arrived at {arrivals[answer.id]} s")
    return result


def busy() -> tuple[float, float, float]:
    """Now, and seconds of processor time so far: of the whole machine, of this process and its finished children."""
    machine, here = psutil.cpu_times(), time.monotonic()
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    idle = machine.idle + getattr(machine, "iowait", 0.0)
    return here, psutil.cpu_count() * here - idle, sum(each.ru_utime + each.ru_stime for each in spent)


def share_of_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Share of all cores' time between two readings of `busy` that other programs took."""
    wall, machine, ours = (late - early for early, late in zip(before, after, strict=True))
    return max(0.0, (machine - ours) / (wall * psutil.cpu_count()))
