"""The fused iteration: admit newcomers, decode one token for every running request and process the newcomers' prompts in one pass, let
the finished go."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from numbers import Integral

import torch
from torch import Tensor

from repro.flover.buffers import Buffers, WindowBuffers
from repro.flover.captured import Captured
from repro.flover.request import FinishReason, Generation, QueueFull, Request, RequestError
from repro.flover.sampling import Sampler
from repro.flover.scheduler import Scheduler
from repro.models.decoder import Decoder
from repro.models.rows import Rows

__all__ = ["Engine", "Report"]


@dataclass
class Report:
    """What serving a list of requests gave. `iterations` counts passes in which somebody decoded, `rows` the slots that they
    decoded, `dead_rows` those among them whose request was done. `rejected`: reason by request id. `total_seconds`: from the start to the last
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
        model: Decoder,
        scheduler: Scheduler,
        capacity: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        layout: Callable[[Decoder, int, int], Buffers] = WindowBuffers,
    ) -> None:
        if not 1 <= capacity <= model.config.context:
            raise ValueError(f"capacity is {capacity}, allowed: 1 to the model's context {model.config.context}")
        self.model, self.scheduler = model, scheduler
        self.buffers = layout(model, scheduler.slots, capacity)
        self.sampler = Sampler(scheduler.slots, model.kernels.argmax)
        self.iterations = self.rows = self.dead_rows = 0
        whole = isinstance(model, Decoder) and model.shard is None and model.kernels.capturable
        self._captured = Captured(model, self.buffers.cache) if whole else None
        self._gone: list[Generation] = []  # ended before they ran, and not handed out yet
        self._clock, self._sleep, self._start = clock, sleep, clock()

    def submit(self, request: Request) -> None:
        """Queue a request; one without `arrival_s` arrives now. RequestError when it can never be served, QueueFull when too many
        wait; others are not touched."""
        limits = {"a slot": self.buffers.capacity, "the pool": self.buffers.most, "kv_tokens": self.scheduler.kv_tokens}
        for what, most in limits.items():
            if most and request.kv_tokens > most:
                raise RequestError(f"request {request.id}: needs {request.kv_tokens} KV positions, {what} has {most}")
        vocab = self.model.config.vocab
        if bad := [t for t in request.prompt if not (isinstance(t, Integral) and 0 <= t < vocab)]:
            raise RequestError(f"request {request.id}: token {bad[0]} is outside 0 … {vocab - 1}, whole numbers")
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

    def prepare(self) -> None:
        """Do before a clock starts what the first iterations would do otherwise: on a GPU, record the graphs of all sizes of batch. Needs an
        engine without running requests."""
        if self._captured is not None and not self.scheduler.running:
            self._captured.prepare(self.scheduler.slots)

    def step(self) -> list[Generation]:
        """One iteration between two token boundaries; returns the generations that finished in it."""
        self._end_late()
        finished, self._gone = self._gone + self._retire(), []
        for request in self.scheduler.admit(self.buffers.fits):
            self._admit(request)
        self._iterate()
        return finished + self._retire()

    def serve(self, requests: Sequence[Request]) -> Report:
        """Submit each request when its `arrival_s` has come (None: at once), until all have finished. Rejected ones are in the report.

        An engine serves one list: its counters start at its construction.
        """
        report = Report()
        timed = [request if request.arrival_s is not None else replace(request, arrival_s=0.0) for request in requests]
        pending = deque(sorted(timed, key=lambda request: request.arrival_s))
        self.prepare()
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
        self.sampler.put(slot, request.sampling)
        generation = Generation(request, slot, self._now(), streamed=self.scheduler.streams)
        self.scheduler.running[slot] = generation

    def _iterate(self) -> None:
        """One pass through the model: a token for every slot whose prompt is done, and the next piece of the prompts that are not."""
        pieces, spans = self._pieces(), self._decoding()
        if not pieces and not spans:
            return
        buffers, running = self.buffers, self.scheduler.running
        rows = [Rows.decode(buffers.tokens[s], buffers.lengths[s], s, buffers.longest(s)) for s in spans]
        rows += [Rows.prompt(self._tensor(piece), slot, running[slot].prefilled) for slot, piece in pieces.items()]
        decoding = [slot for span in spans for slot in range(span.start, span.stop)]
        complete = [slot for slot, piece in pieces.items() if running[slot].prompt_left == len(piece)]

        logits = self._forward(Rows.joined(rows), None if not pieces else self._wanted(len(decoding), pieces, complete))
        tokens = self.sampler(logits, decoding + complete)
        for span, given in zip(spans, tokens.split([s.stop - s.start for s in spans] + [len(complete)]), strict=False):
            buffers.advance(span, given)
        answers = tokens.tolist()  # the one time that the host waits for the device
        self._note_decoded(dict(zip(decoding, answers, strict=False)))
        self._note_prompts(pieces, dict(zip(complete, answers[len(decoding) :], strict=True)))

    def _forward(self, rows: Rows, wanted: Tensor | None) -> Tensor:
        """Logits of the rows that are wanted; None: of all, which decode."""
        if wanted is None and self._captured is not None:
            return self._captured(rows)
        return self.model.forward(rows, self.buffers.cache, slice(None) if wanted is None else wanted)

    def _pieces(self) -> dict[int, tuple[int, ...]]:
        """What this pass processes of prompts, by slot, as many tokens as the scheduler allows: first of the one that is under way (there
        is one at most), then of newcomers in order of admission."""
        left = self.scheduler.prefill_tokens or sys.maxsize
        pieces = {}
        for slot, generation in self.scheduler.running.items():
            if generation.prompt_left and not generation.done:
                piece = generation.request.prompt[generation.prefilled :][:left]
                assert piece, f"request {generation.request.id} was admitted too early"
                pieces[slot] = piece
                left -= len(piece)
        return pieces

    def _decoding(self) -> list[slice]:
        """The slots of the window, but for those with a prompt under way: one slice, or several around those. None when nobody decodes."""
        running, window = self.scheduler.running, self.buffers.window
        if not any(generation.decoding for generation in running.values()):
            return []
        between = [slot for slot, g in running.items() if g.prompt_left and not g.done]
        edges = [window.start - 1, *sorted(between), window.stop]
        return [slice(low + 1, high) for low, high in pairwise(edges) if low + 1 < high]

    def _wanted(self, decoding: int, pieces: dict[int, tuple[int, ...]], complete: list[int]) -> Tensor:
        """Rows whose logits are needed: all that decode, and the last of prompts that end here."""
        ends = accumulate(map(len, pieces.values()), initial=decoding - 1)
        last = dict(zip(pieces, list(ends)[1:], strict=True))
        return self._tensor([*range(decoding), *(last[slot] for slot in complete)])

    def _note_decoded(self, answers: dict[int, int]) -> None:
        """Hand tokens out, by slot."""
        if not answers:
            return
        self.iterations += 1
        self.rows += len(answers)
        for slot, token in answers.items():
            generation = self.scheduler.running.get(slot)
            if generation is not None and generation.decoding:
                generation.append(token)
            else:
                self.dead_rows += 1

    def _note_prompts(self, pieces: dict[int, tuple[int, ...]], first: dict[int, int]) -> None:
        """Note what of the prompts is done, and the first tokens of those that are complete."""
        now = self._now()
        for slot, piece in pieces.items():
            generation = self.scheduler.running[slot]
            generation.prefilled += len(piece)
            if slot in first:
                generation.append(first[slot])
                generation.first_token_s = now
            # A request of one new token has no position left to write: if its row stays, it stands on its last one.
            length = min(generation.prefilled, generation.request.kv_tokens - 1)
            self.buffers.store(slot, first.get(slot, 0), length)

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.model.device)

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
