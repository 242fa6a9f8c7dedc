"""What the engine scripts share: read a job, warm up, follow the arrival times, check the tokens, write the result.

    python <engine>.py job.json result.json

A job says which model, dtype, threads and requests; a result says when each request was handed over, had its first
token and was done, which tokens it got, and how much memory that took. Standard library only: every engine runs this
file with its own interpreter. A script whose standard input ends has lost who started it, and ends.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol


@dataclass(frozen=True)
class Request:
    """Decode greedily, whatever the tokens are, until there are exactly `output_tokens`."""

    id: int
    arrival_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Job:
    """`model`: a Hugging Face folder; `gguf`: the same weights for llama.cpp; `dtype`: `bfloat16` or `float32`."""

    model: str
    gguf: str
    dtype: str
    threads: int
    variant: str
    requests: list[Request]

    @property
    def sequences(self) -> int:
        """Most requests that run at once, in every engine: all."""
        return len(self.requests)

    @property
    def positions(self) -> int:
        """KV positions that the longest request needs, rounded up to whole blocks of 64."""
        longest = max(len(request.prompt) + request.output_tokens for request in self.requests)
        return -(-longest // 64) * 64

    @classmethod
    def read(cls, path: str | Path) -> "Job":
        found = json.loads(Path(path).read_text())
        return cls(**{**found, "requests": [Request(**request) for request in found["requests"]]})

    def write(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self)))


@dataclass
class Answer:
    """Seconds from the start of serving. `first_token_s`, `longest_gap_s` (between two of its tokens): None where the
    engine does not tell."""

    id: int
    start_s: float
    first_token_s: float | None = None
    finish_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    longest_gap_s: float | None = None


@dataclass(frozen=True)
class Result:
    """`version`: of the engine; `load_s`: until it had answered the warm-up; `peak_bytes`: see there."""

    version: str
    load_s: float
    peak_bytes: int | None
    requests: list[Answer]


class Event(NamedTuple):
    """New tokens of a request. `streamed`: whether they were there before the request was done."""

    id: int
    tokens: Sequence[int]
    done: bool
    streamed: bool = True


class Server(Protocol):
    """A peer as the loop below drives it. A peer with a scheduler of its own in another thread waits `seconds` for news
    at most."""

    @property
    def busy(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def step(self, seconds: float) -> list[Event]: ...


def serve(server: Server, requests: Sequence[Request]) -> list[Answer]:
    """Hand each request over when its time has come; step until all are done."""
    pending = deque(sorted(requests, key=lambda request: request.arrival_s))
    answers: dict[int, Answer] = {}
    last: dict[int, float] = {}  # when the request's latest token came
    start = time.perf_counter()
    while pending or server.busy:
        while pending and pending[0].arrival_s <= time.perf_counter() - start:
            request = pending.popleft()
            answers[request.id] = Answer(request.id, time.perf_counter() - start)
            server.submit(request)
        left = pending[0].arrival_s - (time.perf_counter() - start) if pending else 1.0
        if not server.busy:
            time.sleep(max(0.0, left))
            continue
        events = server.step(max(0.0, left))
        now = time.perf_counter() - start
        for event in events:
            answer = answers[event.id]
            answer.tokens += event.tokens
            if event.streamed and event.tokens:
                if answer.first_token_s is None:
                    answer.first_token_s = last[event.id] = now
                answer.longest_gap_s = max(answer.longest_gap_s or 0.0, now - last[event.id])
                last[event.id] = now
            if event.done:
                answer.finish_s = now
    return list(answers.values())


def warm_up_requests() -> list[Request]:
    """Four short requests at once: kernels are compiled, caches and thread pools exist before the clock starts."""
    return [Request(-1 - i, 0.0, [5 + i] * 16, 8) for i in range(4)]


def run(start: Callable[[Job], Callable[[Sequence[Request]], list[Answer]]], version: Callable[[], str]) -> None:
    """A script's `main`: `start` loads the model and returns what serves a list of requests."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    status = 1
    try:
        _run(start, version)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # some peers' threads never end by themselves, and all is said


def _run(start: Callable[[Job], Callable[[Sequence[Request]], list[Answer]]], version: Callable[[], str]) -> None:
    job = Job.read(sys.argv[1])
    began = time.perf_counter()
    serve_list = start(job)
    serve_list(warm_up_requests())
    load_s = time.perf_counter() - began
    forget_peak()
    answers = serve_list(job.requests)
    result = Result(version(), load_s, peak_bytes(), answers)
    check(job.requests, answers)
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)))


def _end_with_parent() -> None:
    """With all processes of the engine, which have a group of their own."""
    with contextlib.suppress(OSError):
        os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _group() -> list[Path]:
    """Folders in /proc of this process and those that it has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(folder.name)) == os.getpgid(0):
                found.append(folder)
    return found


def forget_peak() -> None:
    """Let the kernel count the peak of resident memory from now on."""
    for folder in _group():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            (folder / "clear_refs").write_text("5")


def peak_bytes() -> int | None:
    """Most resident memory since `forget_peak`, as the kernel keeps it: the sum over the engine's processes, in which
    pages that several share count in each. None where there is no /proc."""
    total = 0
    for folder in _group():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (folder / "status").read_text()
            total += sum(1024 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    return total or None


def check(requests: Sequence[Request], answers: Sequence[Answer]) -> None:
    """Every request has one answer with all its tokens and no more; ValueError says which has not."""
    found = {answer.id: len(answer.tokens) for answer in answers}
    for request in requests:
        if found.get(request.id) != request.output_tokens:
            raise ValueError(f"request {request.id}: {found.get(request.id)} tokens, asked for {request.output_tokens}")
    if len(answers) != len(requests):
        raise ValueError(f"{len(answers)} answers, asked for {len(requests)}")
