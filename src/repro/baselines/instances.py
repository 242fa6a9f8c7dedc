"""Concurrent instances: each request is served by a process with a model of its own (the paper's FasterTransformer).

The processes are warm before the first request comes. Whoever is free takes the next request in order, waits until it
arrives, and decodes it alone; nothing is shared but the machine, so they slow each other down."""

import contextlib
import gc
import itertools
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
from repro.flover.report import ServingReport, middle, repeated
from repro.flover.request import Request
from repro.launch import launch
from repro.models.decoder import Decoder

_NOTICE_S = 0.2  # between the moment that all are ready and the start of serving
_PACE_PROMPT, _PACE_STEPS = 8, 24  # of the requests that are decoded at once to measure how much that slows each down


@dataclass
class Served:
    """`passes`: a report of each, as of an engine; a generation's `slot` is the number of its instance.
    `instance_bytes`: unique set size of each instance when ready, on a GPU with the memory that it has reserved there.
    `pace_s`: seconds of an iteration by how many instances decode at once."""

    passes: list[ServingReport]
    instance_bytes: list[int]
    pace_s: dict[int, float]

    @property
    def report(self) -> ServingReport:
        """Of the pass whose total time is the median."""
        return middle(self.passes)

    def slowdown(self, running: int) -> float:
        """How many times longer an iteration takes when so many run: linear between measured numbers. ValueError for
        more than were measured, and where the pace of one alone was not."""
        counts = sorted(self.pace_s)
        if 1 not in counts:
            raise ValueError(f"the pace was measured of {counts or 'no number of instances'}: 1 is needed")
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
    passes: int = 1,
    short_s: float = math.inf,
) -> Served:
    """Serve requests at their `arrival_s` on `instances` processes of `threads` threads; all of them `passes` times, or
    once where the first pass takes `short_s` seconds or more.

    `build` makes the model inside each process and must be picklable; `capacity`: KV positions of an instance. `paces`:
    measure before, how long an iteration takes when so many instances decode at once (up to `instances`). ValueError
    (arguments); launch.RankError when a process raised or was killed, with its signal, after all others have been
    ended; launch.LaunchTimeout after `timeout_s`.
    """
    if instances < 1 or any(not 1 <= pace <= instances for pace in paces):
        raise ValueError(f"instances is {instances} and paces {list(paces)}: at least 1, and 1 to {instances}")
    if paces and capacity < 2:
        raise ValueError(f"capacity is {capacity}: at least 2 to measure paces, which needs an iteration")
    if passes < 1:
        raise ValueError(f"passes is {passes}: at least 1")
    if not requests or any(request.arrival_s is None for request in requests):
        raise ValueError("requests: at least one is needed, each with its arrival_s")
    ordered = sorted(requests, key=lambda request: request.arrived_s)
    _release()
    with tempfile.TemporaryDirectory(prefix="repro-instances-") as folder, _patient_threads():
        asked = build, ordered, capacity, f"{folder}/following", tuple(paces), passes, short_s
        told = launch(_instance, instances, *asked, timeout_s=timeout_s, threads=threads)
    pace_s = {pace: median([one.pace_s[pace] for one in told if pace in one.pace_s]) for pace in paces}
    reports = [_joined(parts) for parts in zip(*(one.passes for one in told), strict=True)]
    return Served(reports, [size for one in told for size in one.instance_bytes], pace_s)


def _joined(parts: Sequence[ServingReport]) -> ServingReport:
    """One pass, from what each instance did in it."""
    generations = sorted((g for one in parts for g in one.generations), key=lambda generation: generation.request.id)
    report = ServingReport(generations, total_seconds=parts[0].total_seconds)
    report.iterations = report.rows = sum(one.iterations for one in parts)
    report.cache_bytes = sum(one.cache_bytes for one in parts)
    return report


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
    passes: int,
    short_s: float,
) -> Served:
    """One process: get ready, wait for the others, serve."""
    model, start = build(), math.inf  # the clock stands at 0 until there is a start
    engine = Engine(model, serial(), capacity, clock=lambda: max(0.0, time.perf_counter() - start))
    _release()
    engine.prepare()
    pace_s = {pace: seconds for pace in paces if (seconds := _pace(engine, rank, pace)) is not None}
    first, room = requests[0], capacity - len(requests[0].prompt)
    answer(engine, Request(first.id, first.prompt, 2 if room > 0 else 1, 0.0))
    nbytes = psutil.Process().memory_full_info().uss
    if model.device.type == "cuda":
        nbytes += torch.cuda.memory_reserved(model.device)
    queue = dist.FileStore(following, world_size)
    number = itertools.count()

    def serve() -> ServingReport:
        """What this process does in a pass; `total_seconds` are those of all, which thus agree on whether to go on."""
        nonlocal start
        started, key, generations = engine.iterations, f"following {next(number)}", []
        dist.barrier()
        chosen = torch.tensor(time.perf_counter() + _NOTICE_S, dtype=torch.float64)
        dist.broadcast(chosen, 0)  # by rank 0, on the machine's clock, which all processes read
        start = chosen.item()
        while (taken := queue.add(key, 1) - 1) < len(requests):  # whoever is free takes the next request
            request = requests[taken]
            time.sleep(max(0.0, start + request.arrived_s - time.perf_counter()))
            generations.append(answer(engine, request))
            generations[-1].slot = rank
        last = torch.tensor(max((g.finish_s for g in generations), default=0.0), dtype=torch.float64)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        report = ServingReport(generations, total_seconds=last.item(), iterations=engine.iterations - started)
        report.cache_bytes = engine.buffers.cache.nbytes
        return report

    return Served(repeated(serve, passes, short_s), [nbytes], pace_s)


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
