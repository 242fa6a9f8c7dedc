"""The fused iteration: admit newcomers and process their prompts, decode one token for every running request at once, let the
finished go."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from repro.flover.buffers import Buffers, WindowBuffers
from repro.flover.request import FinishReason, Generation, QueueFull, Request, RequestError
from repro.flover.sampling import Sampler
from repro.flover.scheduler import Scheduler
from repro.models.llama import Llama

__all__ = ["Engine", "Report"]


@dataclass
class Report:
    """What serving a list of requests gave. `rows` counts slots over all decode iterations, `dead_rows` those among them that gave no
    token: their request was done, or its prompt was not. `rejected`: reason by request id. `total_seconds`: from the start to the last
    finish. `cache_bytes`: keys and values of all slots."""

    generations: list[Generation] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    total_seconds: float = 0.0
    iterations: int = 0
    rows: int = 0
    dead_rows: int = 0
    slot_moves: int = 0
    moved_bytes: int = 0
    cache_bytes: int = 0


class Engine:
    """Serves requests on one model. The scheduler is the policy; the baselines are other schedulers on this same engine.

    `capacity`: KV positions per slot; `layout`: where they lie (`buffers.LAYOUTS`). Drive it with `submit`, `cancel` and `step`, or let
    `serve` follow the requests' arrival times.
    """

    def __init__(
        self,
        model: Llama,
        scheduler: Scheduler,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        layout: Callable[[Llama, int, int], Buffers] = WindowBuffers,
    ) -> None:
        if not 1 <= capacity <= model.config.context:
            raise ValueError(f"capacity is {capacity}, allowed: 1 to the model's context {model.config.context}")
        self.model, self.scheduler = model, scheduler
        self.buffers = layout(model, scheduler.slots, capacity)
        self.sampler = Sampler(scheduler.slots, model.device)
        self.iterations = self.rows = self.dead_rows = 0
        self._prompts: deque[Generation] = deque()  # those whose prompt is not done, in order of admission
        self._gone: list[Generation] = []  # ended before they ran, and not handed out yet
        self._clock, self._sleep, self._start = clock, sleep, clock()

    def submit(self, request: Request) -> None:
        """Queue a request; one without `arrival_s` arrives now. RequestError when it can never be served, QueueFull when too many
        wait; others are not touched."""
        limits = {"a slot": self.buffers.capacity, "the pool": self.buffers.most, "kv_tokens": self.scheduler.kv_tokens}
        for what, most in limits.items():
            if most and request.kv_tokens > most:
                raise RequestError(f"request {request.id}: needs {request.kv_tokens} KV positions, {what} has {most}")
        if bad := [t for t in request.prompt if not 0 <= t < self.model.config.vocab]:
            raise RequestError(f"request {request.id}: token {bad[0]} is outside 0 … {self.model.config.vocab - 1}")
        if request.arrival_s is None:
            request = replace(request, arrival_s=self._now())
        self.scheduler.submit(request)

    def cancel(self, request_id: int) -> bool:
        """End a request at the next token boundary, with the tokens that it has. False when none of this number waits or runs."""
        for request in self.scheduler.waiting:
            if request.id == request_id:
                self.scheduler.waiting.remove(request)
                self._leave_queue(request, "cancelled")
                return True
        for generation in self.scheduler.running.values():
            if generation.request.id == request_id and not generation.done:
                generation.finish_reason = "cancelled"
                return True
        return False

    @property
    def ready(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._gone) or self.scheduler.ready

    def step(self) -> list[Generation]:
        """One iteration between two token boundaries; returns the generations that finished in it."""
        self._end_late()
        finished, self._gone = self._gone + self._retire(), []
        for request in self.scheduler.admit(self.buffers.fits):
            self._admit(request)
        self._prefill()
        finished += self._retire()  # an answer of a single token is complete after its prefill
        if any(generation.decoding for generation in self.scheduler.running.values()):
            self._decode()
            finished += self._retire()
        return finished

    def serve(self, requests: Sequence[Request]) -> Report:
        """Submit each request when its `arrival_s` has come (None: at once), until all have finished. Rejected ones are in the report.

        An engine serves one list: its counters start at its construction.
        """
        report = Report()
        timed = [request if request.arrival_s is not None else replace(request, arrival_s=0.0) for request in requests]
        pending = deque(sorted(timed, key=lambda request: request.arrival_s))
        self._start = self._clock()
        while pending or self.ready or self.scheduler.waiting:
            while pending and pending[0].arrival_s <= self._now():
                self._try_submit(pending.popleft(), report)
            self.scheduler.closed = not pending
            if self.ready:
                report.generations += self.step()
            else:
                arrival = pending[0].arrival_s if pending else math.inf
                self._sleep(max(0.0, min(arrival, self.scheduler.next_deadline) - self._now()))
                self._end_late()
        report.total_seconds = max((g.finish_s for g in report.generations), default=0.0)
        report.generations.sort(key=lambda generation: generation.request.id)
        report.iterations, report.rows, report.dead_rows = self.iterations, self.rows, self.dead_rows
        report.slot_moves, report.moved_bytes = self.buffers.slot_moves, self.buffers.moved_bytes
        report.cache_bytes = self.buffers.cache.nbytes
        return report

    def _try_submit(self, request: Request, report: Report) -> None:
        try:
            self.submit(request)
        except (RequestError, QueueFull) as error:
            report.rejected[request.id] = str(error)

    def _end_late(self) -> None:
        """End what is beyond its deadline, waiting or running."""
        now = self._now()
        for request in self.scheduler.expired(now):
            self._leave_queue(request, "deadline")
        for generation in self.scheduler.running.values():
            limit = generation.request.deadline_s
            if limit is not None and now >= generation.request.arrival_s + limit and not generation.done:
                generation.finish_reason = "deadline"

    def _leave_queue(self, request: Request, reason: FinishReason) -> None:
        now = self._now()
        self._gone.append(Generation(request, -1, now, finish_s=now, finish_reason=reason))

    def _admit(self, request: Request) -> None:
        slot = self.buffers.allocate(request.kv_tokens)
        generation = Generation(request, slot, self._now(), streamed=self.scheduler.streams)
        self.scheduler.running[slot] = generation
        self._prompts.append(generation)

    def _prefill(self) -> None:
        """Process prompts one by one, in order, as many tokens as the scheduler allows in an iteration."""
        if not self._prompts:
            return
        left = self.scheduler.prefill_tokens or sum(len(generation.request.prompt) for generation in self._prompts)
        where = {id(generation): slot for slot, generation in self.scheduler.running.items()}
        while self._prompts and left > 0:
            generation = self._prompts[0]
            if generation.done:  # cancelled or late, and perhaps evicted
                self._prompts.popleft()
                continue
            slot, start = where[id(generation)], generation.prefilled
            piece = generation.request.prompt[start : start + left]
            logits = self.model.prefill(torch.tensor(piece, device=self.model.device), self.buffers.cache, slot, start)
            generation.prefilled += len(piece)
            left -= len(piece)
            token = 0
            if generation.prefilled == len(generation.request.prompt):
                self._prompts.popleft()
                self.sampler.put(slot, generation.request.sampling)
                token = int(self.sampler(logits[None], slice(slot, slot + 1)))
                generation.append(token)
                generation.first_token_s = self._now()
            # A request of one new token has no position left to write: if its row stays, it stands on its last one.
            self.buffers.store(slot, token, min(generation.prefilled, generation.request.kv_tokens - 1))

    def _decode(self) -> None:
        """One token for every slot of the window, in one pass through the model."""
        buffers, window = self.buffers, self.buffers.window
        lengths, cache = buffers.lengths[window], buffers.cache
        logits = self.model.decode(buffers.tokens[window], lengths, cache, window, buffers.longest)
        tokens = self.sampler(logits, window)
        buffers.advance(tokens)
        self.iterations += 1
        self.rows += len(tokens)
        for slot, token in enumerate(tokens.tolist(), window.start):
            generation = self.scheduler.running.get(slot)
            if generation is not None and generation.decoding:
                generation.append(token)
                continue
            self.dead_rows += 1
            if (
                generation is not None and not generation.tokens
            ):  # its prompt goes on where it was: what was written will be again
                buffers.store(slot, 0, generation.prefilled)

    def _retire(self) -> list[Generation]:
        """Evict what the scheduler says and follow the buffers' moves."""
        slots, running = self.scheduler.retire(), self.scheduler.running
        if not slots:
            return []
        finished = [running.pop(slot) for slot in slots]
        moves = self.buffers.evict(slots)
        self.sampler.move(moves)
        for source, destination in moves:
            running[destination] = running.pop(source)
        now = self._now()
        for generation in finished:
            generation.finish_s = now
        return finished

    def _now(self) -> float:
        return self._clock() - self._start
