"""The fused iteration: a token for every running request, and the newcomers' prompts, in one pass through the model."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from repro.flover.buffers import Buffers, WindowBuffers
from repro.flover.cuda_graph import GraphedForward
from repro.flover.fields import number, shown
from repro.flover.report import ServingReport
from repro.flover.request import FinishReason, Generation, QueueFull, Request, RequestError
from repro.flover.sampling import GREEDY, next_tokens
from repro.flover.scheduler import Scheduler
from repro.models.decoder import Decoder
from repro.models.rows import Rows


@dataclass(frozen=True)
class _Chunk:
    """Prompt tokens that one pass processes in `slot`, from position `start` on. `final`: the prompt ends here."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    final: bool


@dataclass(frozen=True)
class _Batch:
    """The rows of one pass: one for each slot of `windows`, which decode, then one for each token of `chunks`."""

    windows: list[slice]
    chunks: list[_Chunk]

    @cached_property
    def decoding(self) -> list[int]:
        """The slots of all windows."""
        return [slot for window in self.windows for slot in range(window.start, window.stop)]

    @cached_property
    def sampled(self) -> list[int]:
        """Slots that get a token: those that decode, then those whose prompt is complete."""
        return self.decoding + [chunk.slot for chunk in self.chunks if chunk.final]

    @property
    def sampled_rows(self) -> list[int]:
        """For each of `sampled` the row whose logits give its token: its only one, or the last of its prompt."""
        decoding = len(self.decoding)
        _, *ends = accumulate((len(chunk.tokens) for chunk in self.chunks), initial=decoding)
        return [*range(decoding), *(end - 1 for chunk, end in zip(self.chunks, ends, strict=True) if chunk.final)]


class EngineTorn(RuntimeError):
    """An earlier step broke off while it changed what runs, so that no further token would be right."""


class Engine:
    """Serves requests on one model. The scheduler is the policy; the baselines are other schedulers. `capacity`: KV
    positions per slot; `layout`: where they lie (`buffers.LAYOUTS`). `clock` gives the time and `sleep` waits, both in
    seconds. Drive it with `submit`, `cancel` and `step`, from one thread, or let `serve` follow the requests' arrival
    times. ValueError for a capacity that is no whole number from 1 to the model's context (or sliding window), for a
    scheduler that already holds requests, which this engine could not answer, and for one part of a sharded model.
    """

    def __init__(
        self,
        model: Decoder,
        scheduler: Scheduler,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        layout: Callable[[Decoder, int, int], Buffers] = WindowBuffers,
    ) -> None:
        if held := len(scheduler.running) + len(scheduler.waiting):
            raise ValueError(f"the scheduler holds {held} requests that this engine does not know, allowed: none")
        shard = model.shard if isinstance(model, Decoder) else None
        if shard is not None and shard.size > 1:
            alone = f"found rank {shard.rank} of {shard.size} alone"
            raise ValueError(f"a sharded model is served through parallel.Leader, {alone}")
        self.model, self.scheduler = model, scheduler
        capacity = number(int, "capacity", capacity, "a whole number", error=ValueError)
        self.buffers = layout(model, scheduler.slots, capacity)
        self.iterations = self.rows = self.dead_rows = 0
        self.report = ServingReport()  # of `serve`
        whole = isinstance(model, Decoder) and shard is None and model.kernels.capturable
        self._graphs = GraphedForward(model, self.buffers.cache) if whole else None
        self._gone: list[Generation] = []  # ended, and not handed out yet
        self._ids: set[int] = set()  # of requests that were submitted, and whose answer was not handed out yet
        self._state: Literal["whole", "in a pass", "torn"] = "whole"  # other than whole: the step before broke off
        self._clock, self._sleep, self._start = clock, sleep, clock()

    def submit(self, request: Request) -> None:
        """Queue a request, which the next step may admit: `serve` alone waits for an `arrival_s` that lies ahead (times and
        deadline count from there). Without one it arrives now. RequestError: never possible, or its id is that of a
        request whose answer was not handed out yet; QueueFull: not now."""
        request = _arriving(request, self._now())
        who = f"request {request.id}"
        if request.id in self._ids:
            raise RequestError(f"{who}: another of this id was not handed out yet, an id of its own is needed")
        limits = {"a slot": self.buffers.capacity, "the pool": self.buffers.most, "kv_tokens": self.scheduler.kv_tokens}
        for what, most in limits.items():
            if most and request.kv_tokens > most:
                asked = f"prompt of {len(request.prompt)} tokens, max_new_tokens {request.max_new_tokens}"
                raise RequestError(f"{who}: needs {request.kv_tokens} KV positions, {what} has {most} ({asked})")
        vocab = self.model.config.vocab
        for where in ("prompt", "stop_tokens"):
            if bad := [token for token in getattr(request, where) if not 0 <= token < vocab]:
                raise RequestError(f"{who}: token {shown(bad[0])} is outside 0 … {vocab - 1}, in {where}")
        self.scheduler.submit(request)
        self._ids.add(request.id)

    def cancel(self, request_id: int) -> bool:
        """End a request at the next token boundary, with the tokens it has. False when it neither waits nor runs."""
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
    def running(self) -> list[Generation]:
        """Answers under way, in order of admission. Each is the same object until `step` hands it out: whoever streams
        takes what is new of its `tokens` after each step."""
        return list(self.scheduler.running.values())

    @property
    def ready(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._gone) or self.scheduler.ready

    def prepare(self) -> None:
        """Record the CUDA graphs of all batches of up to `cuda_graph.MOST` rows before a clock starts. Does nothing
        while requests run, for a sharded model, and with kernels that are not `capturable` (Triton's alone are)."""
        if self._graphs is not None and not self.scheduler.running:
            self._graphs.prepare(self.scheduler.slots)

    def step(self) -> list[Generation]:
        """The paper's loop, once: admit at the token boundary, one fused pass, sample, then finish and reorder. Returns
        the generations that ended.

        No request makes it raise. What the model raises for a whole pass gets out, and changes nothing: the next step
        hands out what had ended before, if anything had, or repeats the pass. EngineTorn after one that broke off
        elsewhere (Ctrl-C, a device that is lost).
        """
        if self._state == "whole" or not self._gone:
            self._step()
        return self._handed_out()

    def serve(self, requests: Sequence[Request]) -> ServingReport:
        """Submit each request when its `arrival_s` has come (None: at once), until all have finished. The report names
        those that `submit` refused with RequestError, or with QueueFull because `queue_limit` requests were waiting. An
        engine serves one list: its counters start when it is made. RequestError, before anything is served, for an
        entry that is no Request.

        When a step raises, that gets out, and `report` has what had ended by then."""
        report = self.report = ServingReport()
        pending = deque(
            sorted((_arriving(request, 0.0) for request in requests), key=lambda request: request.arrived_s)
        )
        self.prepare()
        self._start = self._clock()
        try:
            self._follow(pending, report)
        finally:
            report.generations += self._handed_out()  # none, unless a step has raised
            report.total_seconds = max((g.finish_s for g in report.generations), default=0.0)
            report.generations.sort(key=lambda generation: generation.request.id)
            report.iterations, report.rows, report.dead_rows = self.iterations, self.rows, self.dead_rows
            report.slot_moves, report.moved_bytes = self.buffers.slot_moves, self.buffers.moved_bytes
            report.cache_bytes = self.buffers.cache.nbytes
        return report

    def _follow(self, pending: deque[Request], report: ServingReport) -> None:
        """Serve those `pending`, in order of arrival, until all have ended."""
        while pending or self.ready or self.scheduler.waiting:
            while pending and pending[0].arrived_s <= self._now():
                request = pending.popleft()
                try:
                    self.submit(request)
                except (RequestError, QueueFull) as error:
                    report.rejected[request.id] = str(error)
            self.scheduler.closed = not pending
            if self.ready:
                report.generations += self.step()
            else:
                arrival = pending[0].arrived_s if pending else math.inf
                self._sleep(max(0.0, min(arrival, self.scheduler.next_deadline) - self._now()))
                self._end_late()

    def _step(self) -> None:
        if self._state == "torn":
            rest = "serve the rest on a new engine, with a new scheduler"
            raise EngineTorn(f"an earlier step broke off while it changed what runs: {rest}")
        self._state = "torn"  # until it is done, but for the pass itself
        began = self._end_late()
        self._gone += self._leave()  # cancelled or late since the last step
        self._admit()
        self._iterate(began)
        self._gone += self._leave()
        self._state = "whole"

    def _handed_out(self) -> list[Generation]:
        """What has ended and was not handed out yet."""
        finished, self._gone = self._gone, []
        if finished:
            self._ids.difference_update(generation.request.id for generation in finished)
        return finished

    def _end_late(self) -> float:
        """End what is beyond its deadline, waiting or running; returns the time compared with, in seconds."""
        now = self._now()
        for request in self.scheduler.expired(now):
            self._leave_queue(request, "deadline")
        for generation in self.scheduler.running.values():
            if now >= generation.request.expiry_s and not generation.done:
                generation.finish_reason = "deadline"
        return now

    def _leave_queue(self, request: Request, reason: FinishReason, cause: str = "") -> None:
        now = self._now()
        self._gone.append(Generation(request, -1, now, finish_s=now, finish_reason=reason, cause=cause))

    def _admit(self) -> None:
        """Requests enter the batch: those that the scheduler takes from the queue, each with a slot of its own."""
        for request in self.scheduler.admit(self.buffers.fits):
            if not self.buffers.fits([request.kv_tokens]):  # a policy that does not ask
                self._leave_queue(request, "error", "the scheduler admitted it, and the buffers have no room")
                continue
            slot = self.buffers.allocate(request.kv_tokens)
            generation = Generation(request, slot, self._now(), streamed=self.scheduler.streams)
            self.scheduler.running[slot] = generation

    def _iterate(self, began: float) -> None:
        """One fused pass; a token for each request that decodes, and for each whose prompt is complete with it. The
        scheduler is told what it took since `began`."""
        chunks = self._chunks()
        batch = _Batch(self._windows(), chunks)
        if not batch.windows and not batch.chunks:
            return
        running = (self.scheduler.running.get(slot) for slot in batch.sampled)
        asked = [(each.request.sampling, len(each.tokens)) if each else (GREEDY, 0) for each in running]  # dead: greedy
        self._state = "in a pass"  # which writes to positions that nobody has counted yet, so it can be repeated
        try:
            tokens = next_tokens(self._forward(batch), asked, self.model.kernels.argmax)
        except Exception as error:
            kept = f"{len(self._gone)} answers that had ended are kept for it" if self._gone else "no answer is lost"
            error.add_note(f"Engine.step: nobody got a token of this pass, the next step repeats it, and {kept}")
            raise
        self._state = "torn"
        self.buffers.advance(batch.windows, tokens)
        answers = tokens.tolist()  # the one time that the host waits for the device
        now = self._now()
        self.scheduler.budget.timed(sum(len(chunk.tokens) for chunk in batch.chunks), now - began)
        self._hand_out(batch, dict(zip(batch.sampled, answers, strict=True)), now)
        if min(answers, default=0) < 0:  # whose request has ended by it; what it leaves may be NaN
            for slot, token in zip(batch.sampled, answers, strict=True):
                if token < 0:
                    self.buffers.clear(slot)

    def _leave(self) -> list[Generation]:
        """Requests leave the batch: those that the scheduler retires. The buffers close the holes; slots may move."""
        slots, running = self.scheduler.retire(), self.scheduler.running
        if not slots:
            return []
        for slot in slots:
            # Nobody has seen logits of all that is stored; after an error it was cleared.
            if running[slot].finish_reason not in ("length", "stop", "error"):
                self.buffers.clear(slot)
        finished = [running.pop(slot) for slot in slots]
        if moved := dict(self.buffers.evict(slots)):
            kept = {moved.get(slot, slot): generation for slot, generation in running.items()}
            running.clear()  # and filled anew, so that it stays in order of admission
            running.update(kept)
        now = self._now()
        for generation in finished:
            generation.finish_s = now
        return finished

    def _windows(self) -> list[slice]:
        """Slots that decode: the window, or what is left of it around those whose prompt is not complete, whether this
        pass has a chunk of it or not. Empty when nobody decodes."""
        running, window = self.scheduler.running, self.buffers.window
        if not any(generation.decoding for generation in running.values()):
            return []
        prompts = (slot for slot, generation in running.items() if generation.prompt_left and not generation.done)
        edges = [window.start - 1, *sorted(prompts), window.stop]
        return [slice(low + 1, high) for low, high in pairwise(edges) if low + 1 < high]

    def _chunks(self) -> list[_Chunk]:
        """Chunked prefill: as many prompt tokens as the scheduler allows, in order of admission. A request
        that was admitted before its prompt's turn waits in its slot."""
        left, chunks = self.scheduler.prompt_tokens, []
        for slot, generation in self.scheduler.running.items():
            if left and generation.prompt_left and not generation.done:
                tokens = generation.request.prompt[generation.prefilled :][:left]
                chunks.append(_Chunk(slot, generation.prefilled, tokens, len(tokens) == generation.prompt_left))
                left -= len(tokens)
        return chunks

    def _forward(self, batch: _Batch) -> Tensor:
        """Logits [len(batch.sampled), vocab]."""
        buffers = self.buffers
        parts = [Rows.decode(buffers.tokens[w], buffers.lengths[w], w, buffers.longest(w)) for w in batch.windows]
        parts += [Rows.prompt(self._tensor(chunk.tokens), chunk.slot, chunk.start) for chunk in batch.chunks]
        rows = Rows.joined(parts)
        if batch.chunks:
            return self.model.forward(rows, buffers.cache, self._tensor(batch.sampled_rows))
        return self._graphs(rows) if self._graphs is not None else self.model.forward(rows, buffers.cache)

    def _hand_out(self, batch: _Batch, tokens: dict[int, int], now: float) -> None:
        """Give each request its token (by slot), and note what of the prompts is done."""
        running = self.scheduler.running
        self.iterations += bool(batch.windows)
        self.rows += len(batch.decoding)
        for slot in batch.decoding:
            generation = running.get(slot)
            if generation is not None and generation.decoding:
                generation.append(tokens[slot], now)
            else:
                self.dead_rows += 1
        for chunk in batch.chunks:
            generation = running[chunk.slot]
            generation.prefilled += len(chunk.tokens)
            if chunk.final:
                generation.append(tokens[chunk.slot], now)
            # A request of one new token has no position left to write: if its row stays, it stands on its last one.
            length = min(generation.prefilled, generation.request.kv_tokens - 1)
            self.buffers.store(chunk.slot, tokens.get(chunk.slot, 0), length)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.model.device)

    def _now(self) -> float:
        return self._clock() - self._start


def _arriving(request: Request, at: float) -> Request:
    """With an arrival: `at`, unless it has one. RequestError for what is no request."""
    if not isinstance(request, Request):
        raise RequestError(f"{shown(request)} is of {type(request)}, must be a Request")
    return request if request.arrival_s is not None else replace(request, arrival_s=at)
