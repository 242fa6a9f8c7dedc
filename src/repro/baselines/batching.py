"""Serial, static and dynamic batching: the same engine and model as `repro.flover`, under other schedulers, so that a
difference in time is a difference in scheduling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from repro.flover.engine import Engine
from repro.flover.request import Generation, Request
from repro.flover.scheduler import Fits, Scheduler
from repro.models.decoder import Decoder


def serial(queue_limit: int = 1024) -> Scheduler:
    """One request after another, first come, first served: a scheduler with a single slot."""
    return Scheduler(slots=1, queue_limit=queue_limit)


@dataclass
class StaticScheduler(Scheduler):
    """Wait until `slots` requests have come (or as many as may wait, or no more will), run them as one batch until the longest is done, repeat.

    Rows whose request is done stay, and all answers of a batch are handed back at its end, as by `generate` on a padded
    batch. Whoever drives the engine by `step` sets `closed` when no more will come. ValueError for the limits that
    would tear batches apart.
    """

    streams: ClassVar[bool] = False
    token_gap_s: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill_tokens", "admit_per_iteration", "token_gap_s"):
            if limit := getattr(self, name):
                raise ValueError(f"{name} is {limit}: a static batch is processed whole, 0 allowed")

    @property
    def ready(self) -> bool:
        return bool(self.running) or self._batch_complete

    @property
    def _batch_complete(self) -> bool:
        full = min(self.slots, self.queue_limit)  # beyond it nobody gets in, so it would never be
        return len(self.waiting) >= full or (self.closed and bool(self.waiting))

    def admit(self, fits: Fits = len) -> list[Request]:
        """A whole batch once the one before has left."""
        return super().admit(fits) if not self.running and self._batch_complete else []

    def retire(self) -> list[int]:
        """All slots, when the last of the batch is done."""
        return list(self.running) if all(generation.done for generation in self.running.values()) else []


@dataclass
class DynamicScheduler(StaticScheduler):
    """Dynamic batching with a window of time, one batch after another, as a server in front of one model instance.

    The first of those who wait opens a window of `window_s` seconds. When it closes, or sooner when the batch is full,
    all that have come, up to `slots`, run as one batch until the longest is done; while a batch runs, no other starts.
    The last batch waits for its window too. ValueError for a `window_s` that is not finite or below 0.

    The time is what the engine last told `expired`: who drives it by `step` calls it whenever time has passed.
    """

    window_s: float = 0.0
    now: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.window_s < math.inf:
            raise ValueError(f"window_s is {self.window_s}, must be finite and at least 0")

    @property
    def _closes(self) -> float:
        return self.waiting[0].arrived_s + self.window_s if self.waiting else math.inf

    @property
    def _batch_complete(self) -> bool:
        return len(self.waiting) >= self.slots or self.now >= self._closes

    @property
    def next_deadline(self) -> float:
        """When something happens to those who wait: one is late, or the window closes."""
        return min(super().next_deadline, self._closes)

    def expired(self, now: float) -> list[Request]:
        """As in `Scheduler`; and notes the time."""
        self.now = now
        return super().expired(now)


def lone(model: Decoder, requests: Sequence[Request], capacity: int) -> list[Generation]:
    """Each request decoded with nothing beside it: the reference for tokens and, by `service_s`, for times."""
    engine = Engine(model, serial(), capacity)
    engine.prepare()
    return [answer(engine, request) for request in requests]


def answer(engine: Engine, request: Request) -> Generation:
    """What an engine that has nothing else to do makes of a request."""
    engine.submit(request)
    while not (finished := engine.step()):
        pass
    return finished[0]


def divergence(model: Decoder, generation: Generation, reference: Generation) -> float | None:
    """How far apart the logits of the first differing token and of the reference's token are, by one prefill; None for
    equal answers, infinite when one is merely the beginning of the other."""
    if generation.tokens == reference.tokens:
        return None
    for at, pair in enumerate(zip(generation.tokens, reference.tokens, strict=False)):
        if pair[0] != pair[1]:
            context = torch.tensor([*reference.request.prompt, *reference.tokens[:at]], device=model.device)
            ours, theirs = model.prefill(context, model.new_cache(1, len(context)))[list(pair)].tolist()
            return abs(theirs - ours)
    return math.inf
