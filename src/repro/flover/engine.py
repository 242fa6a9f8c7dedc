"""The fused iteration: admit and prefill newcomers, decode one token for every running request at once, let the finished go."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from repro.flover.buffers import SlotBuffers
from repro.flover.request import Generation, QueueFull, Request, RequestError
from repro.flover.scheduler import Scheduler
from repro.models.llama import Llama

__all__ = ["Engine", "Report"]


@dataclass
class Report:
    """What serving a list of requests gave. `rows` counts slots over all decode iterations, `dead_rows` those among them
    whose request was already done. `rejected`: reason by request id. `total_seconds`: from the start to the last finish."""

    generations: list[Generation] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    total_seconds: float = 0.0
    iterations: int = 0
    rows: int = 0
    dead_rows: int = 0
    slot_moves: int = 0
    moved_bytes: int = 0


class Engine:
    """Serves requests on one model. The scheduler is the policy; the baselines are other schedulers on this same engine.

    `capacity`: KV positions per slot. Drive it with `submit` and `step`, or let `serve` follow the requests' arrival times.
    """

    def __init__(
        self,
        model: Llama,
        scheduler: Scheduler,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 1 <= capacity <= model.config.context:
            raise ValueError(f"capacity is {capacity}, allowed: 1 to the model's context {model.config.context}")
        self.model, self.scheduler = model, scheduler
        self.buffers = SlotBuffers(model, scheduler.slots, capacity)
        self.iterations = self.rows = self.dead_rows = 0
        self._clock, self._sleep, self._start = clock, sleep, clock()

    def submit(self, request: Request) -> None:
        """Queue a request. RequestError when it can never be served, QueueFull when too many wait; others are not touched."""
        if request.kv_tokens > self.buffers.capacity:
            raise RequestError(
                f"request {request.id}: needs {request.kv_tokens} KV positions, a slot has {self.buffers.capacity}"
            )
        if bad := [t for t in request.prompt if not 0 <= t < self.model.config.vocab]:
            raise RequestError(f"request {request.id}: token {bad[0]} is outside 0 … {self.model.config.vocab - 1}")
        self.scheduler.submit(request)

    def step(self) -> list[Generation]:
        """One iteration between two token boundaries; returns the generations that finished in it."""
        for request in self.scheduler.admit():
            self._prefill(request)
        finished = self._retire()  # an answer of a single token is complete after its prefill
        if self.scheduler.running:
            self._decode()
            finished += self._retire()
        return finished

    def serve(self, requests: Sequence[Request]) -> Report:
        """Submit each request when its `arrival_s` has come, until all have finished. Rejected ones are in the report.

        An engine serves one list: its counters start at its construction.
        """
        report = Report()
        pending = deque(sorted(requests, key=lambda request: request.arrival_s))
        self._start = self._clock()
        while pending or self.scheduler.ready:
            while pending and pending[0].arrival_s <= self._now():
                self._try_submit(pending.popleft(), report)
            self.scheduler.closed = not pending
            if self.scheduler.ready:
                report.generations += self.step()
            elif pending:
                self._sleep(max(0.0, pending[0].arrival_s - self._now()))
        report.total_seconds = max((g.finish_s for g in report.generations), default=0.0)
        report.generations.sort(key=lambda generation: generation.request.id)
        report.iterations, report.rows, report.dead_rows = self.iterations, self.rows, self.dead_rows
        report.slot_moves, report.moved_bytes = self.buffers.slot_moves, self.buffers.moved_bytes
        return report

    def _try_submit(self, request: Request, report: Report) -> None:
        try:
            self.submit(request)
        except (RequestError, QueueFull) as error:
            report.rejected[request.id] = str(error)

    def _prefill(self, request: Request) -> None:
        """Run a newcomer's prompt alone, into a slot at the window's edge."""
        slot, admitted = self.buffers.allocate(), self._now()
        prompt = torch.tensor(request.prompt, device=self.model.device)
        logits = self.model.prefill(prompt, self.buffers.keys[:, slot], self.buffers.values[:, slot])
        token = int(logits.argmax())
        self.buffers.store(slot, token, len(request.prompt))
        streamed = self.scheduler.streams
        self.scheduler.running[slot] = Generation(request, slot, admitted, [token], self._now(), streamed=streamed)

    def _decode(self) -> None:
        """One token for every slot of the window, in one pass through the model."""
        buffers, window = self.buffers, self.buffers.window
        lengths = buffers.lengths[window]
        logits = self.model.decode(
            buffers.tokens[window], lengths, buffers.keys[:, window], buffers.values[:, window], int(lengths.max())
        )
        tokens = logits.argmax(-1)
        buffers.advance(tokens)
        self.iterations += 1
        self.rows += len(tokens)
        for slot, token in enumerate(tokens.tolist(), window.start):
            generation = self.scheduler.running[slot]
            if generation.done:
                self.dead_rows += 1
            else:
                generation.tokens.append(token)

    def _retire(self) -> list[Generation]:
        """Evict what the scheduler says and follow the buffers' moves."""
        slots, running = self.scheduler.retire(), self.scheduler.running
        if not slots:
            return []
        finished = [running.pop(slot) for slot in slots]
        for source, destination in self.buffers.evict(slots):
            running[destination] = running.pop(source)
        now = self._now()
        for generation in finished:
            generation.finish_s = now
        return finished

    def _now(self) -> float:
        return self._clock() - self._start
