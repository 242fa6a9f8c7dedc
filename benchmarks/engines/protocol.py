"""What the engine scripts share: read a job, warm up, follow the arrival times, check the tokens, write the result.

    python <engine>.py job.json result.json

A job says which model, dtype, threads and requests; a result says when each request was handed over, had its first
token and was done, and which tokens it got. Standard library only: every engine runs this file with its own
interpreter.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

SEQUENCES = 32  # most requests that run at once, in every engine


@dataclass(frozen=True)
class Request:
    """Decode greedily, whatever the tokens are, until there are exactly `output_tokens`."""

    id: int
    arrival_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Job:
    """`model`: a Hugging Face folder; `gguf`: the same weights for llama.cpp; `dtype`: `bfloat16` or `float32`;
    `device`: `cpu` or `cuda`, which only engines with `gpu` in the catalogue are asked for."""

    model: str
    gguf: str
    dtype: str
    threads: int
    variant: str
    requests: list[Request]
    device: str = "cpu"

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
    """Seconds from the start of serving. `first_token_s`: None where the engine does not tell."""

    id: int
    start_s: float
    first_token_s: float | None = None
    finish_s: float = 0.0
    tokens: list[int] = field(default_factory=list)


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
            if event.streamed and event.tokens and answer.first_token_s is None:
                answer.first_token_s = now
            if event.done:
                answer.finish_s = now
    return list(answers.values())


def warm_up_requests() -> list[Request]:
    """Four short requests at once: kernels are compiled, caches and thread pools exist before the clock starts."""
    return [Request(-1 - i, 0.0, [5 + i] * 16, 8) for i in range(4)]


def run(start: Callable[[Job], Callable[[Sequence[Request]], list[Answer]]], version: Callable[[], str]) -> None:
    """A script's `main`: `start` loads the model and returns what serves a list of requests."""
    job = Job.read(sys.argv[1])
    began = time.perf_counter()
    serve_list = start(job)
    serve_list(warm_up_requests())
    init_s = time.perf_counter() - began
    answers = serve_list(job.requests)
    check(job.requests, answers)
    result = {"version": version(), "init_s": init_s, "requests": [asdict(answer) for answer in answers]}
    Path(sys.argv[2]).write_text(json.dumps(result))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some peers' threads never end by themselves, and all is said


def check(requests: Sequence[Request], answers: Sequence[Answer]) -> None:
    """Every request has its tokens, all of them and no more; ValueError says which has not."""
    found = {answer.id: len(answer.tokens) for answer in answers}
    for request in requests:
        if found.get(request.id) != request.output_tokens:
            raise ValueError(f"request {request.id}: {found.get(request.id)} tokens, asked for {request.output_tokens}")
