"""Concurrent instances: each request is served by a process with a model of its own (the paper's FasterTransformer).

The processes are warm before the first request comes. Whoever is free takes the next request in order, waits until it
arrives, and decodes it alone; nothing is shared but the machine, so they slow each other down."""

import contextlib
import gc
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil
import torch
import torch.distributed as dist

from repro.baselines.batching import answer, serial
from repro.flover.engine import Engine
from repro.flover.report import ServingReport
from repro.flover.request import Request
from repro.launch import launch
from repro.models.decoder import Decoder

_NOTICE_S = 0.2  # between the moment that all are ready and the start of serving
_PACE_PROMPT, _PACE_STEPS = 8, 24  # of the requests that are decoded at once to measure how much that slows each down


@dataclass
class Served:
    """`report`: as of an engine; a generation's `slot` is the number of its instance. `instance_bytes`: unique set size
    of each instance when ready, on a GPU with the memory that it has reserved there. `pace_s`: seconds of an iteration
    by how many instances decode at once."""

    report: ServingReport
    instance_bytes: list[int]
    pace_s: dict[int, float]

    def slowdown(self, running: int) -> float:
        """How many times longer an iteration takes when so many run: linear between measured numbers. ValueError for
        more than were measured."""
        counts = sorted(self.pace_s)
        if running > counts[-1]:
            raise ValueError(f"{running} instances run, but the pace was measured up to {counts[-1]} only")
        return float(np.interp(running, counts, [self.pace_s[count] / self.pace_s[1] for count in counts]))


def serve(
    build: Callable[[], Decoder],
    requests: Sequence[Request],
    instances: int,
    capacity: int,
    threads: int,
    paces: Sequence[int] = (),
    timeout_s: float = 600.0,
) -> Served:
    """Serve requests at their `arrival_s` on `instances` processes of `threads` threads.

    `build` makes the model inside each process and must be picklable; `capacity`: KV positions of an instance. `paces`:
    measure before, how long an iteration takes when so many instances decode at once (up to `instances`). ValueError
    (arguments); launch.RankError when a process raised or was killed, with its signal, after all others have been
    ended; launch.LaunchTimeout after `timeout_s`.
    """
    if instances < 1 or any(not 1 <= pace <= instances for pace in paces):
        raise ValueError(f"instances is {instances} and paces {list(paces)}: at least 1, and 1 to {instances}")
    if paces and capacity < 2:
        raise ValueError(f"capacity is {capacity}: at least 2 to measure paces, which needs an iteration")
    if not requests or any(request.arrival_s is None for request in requests):
        raise ValueError("requests: at least one is needed, each with its arrival_s")
    ordered = sorted(requests, key=lambda request: request.arrived_s)
    _release()
    with tempfile.TemporaryDirectory(prefix="repro-instances-") as folder, _patient_threads():
        asked = build, ordered, capacity, f"{folder}/following", tuple(paces)
        told = launch(_instance, instances, *asked, timeout_s=timeout_s, threads=threads)
    reports = [one.report for one in told]
    generations = sorted((g for one in reports for g in one.generations), key=lambda generation: generation.request.id)
    report = ServingReport(generations, total_seconds=max(generation.finish_s for generation in generations))
    report.iterations = report.rows = sum(one.iterations for one in reports)
    report.cache_bytes = sum(one.cache_bytes for one in reports)
    pace_s = {pace: median([one.pace_s[pace] for one in told if pace in one.pace_s]) for pace in paces}
    return Served(report, [size for one in told for size in one.instance_bytes], pace_s)


@contextlib.contextmanager
def _patient_threads() -> Iterator[None]:
    """Let OpenMP in processes that are started meanwhile sleep while it waits (it spins), unless the user said how."""
    said = "OMP_WAIT_POLICY" in os.environ
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        yield
    finally:
        if not said:
            del os.environ["OMP_WAIT_POLICY"]


def _release() -> None:
    """Give memory of a GPU that this process holds and does not use to the others."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _instance(
    rank: int,
    world_size: int,
    build: Callable[[], Decoder],
    requests: Sequence[Request],
    capacity: int,
    following: str,
    paces: Sequence[int],
) -> Served:
    """One process: get ready, wait for the others, serve."""
    model, start = build(), math.inf  # the clock stands at 0 until there is a start
    engine = Engine(model, serial(), capacity, clock=lambda: max(0.0, time.perf_counter() - start))
    _release()
    engine.prepare()
    pace_s = {pace: seconds for pace in paces if (seconds := _pace(engine, rank, pace)) is not None}
    prompt = requests[0].prompt
    answer(engine, Request(-1, prompt, min(2, capacity - len(prompt) + 1), 0.0))
    warm = engine.iterations
    nbytes = psutil.Process().memory_full_info().uss
    if model.device.type == "cuda":
        nbytes += torch.cuda.memory_reserved(model.device)
    queue = dist.FileStore(following, world_size)  # whoever is free adds one to the number of the next request
    dist.barrier()
    chosen = torch.tensor(time.perf_counter() + _NOTICE_S, dtype=torch.float64)
    dist.broadcast(chosen, 0)  # by rank 0, on the machine's clock, which all processes read
    start = chosen.item()
    generations = []
    while (number := queue.add("following", 1) - 1) < len(requests):
        request = requests[number]
        time.sleep(max(0.0, start + request.arrived_s - time.perf_counter()))
        generations.append(answer(engine, request))
        generations[-1].slot = rank
    cache_bytes, iterations = engine.buffers.cache.nbytes, engine.iterations - warm
    return Served(ServingReport(generations, iterations=iterations, cache_bytes=cache_bytes), [nbytes], pace_s)


def _pace(engine: Engine, rank: int, together: int) -> float | None:
    """Median seconds of an iteration while the first `together` instances decode; None for the others."""
    steps = min(_PACE_STEPS, engine.buffers.capacity - 1)
    request = Request(-1, (1,) * min(_PACE_PROMPT, engine.buffers.capacity - steps), steps + 1, 0.0)
    dist.barrier()
    seconds = []
    if rank < together:
        engine.submit(request)
        engine.step()  # the prompt
        while engine.ready:
            before = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - before)
    dist.barrier()
    return median(seconds) if seconds else None
