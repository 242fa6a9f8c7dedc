"""Serial and static batching: the same engine and model as `repro.flover`, under other schedulers.

Sharing everything but the policy keeps the comparison fair: a difference in time is a difference in scheduling.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from repro.flover.engine import Engine
from repro.flover.request import Generation, Request
from repro.flover.scheduler import Fits, Scheduler
from repro.models.llama import Llama

__all__ = ["StaticScheduler", "divergence", "lone", "serial"]


def serial(queue_limit: int = 1024) -> Scheduler:
    """One request after another, first come, first served: a scheduler with a single slot."""
    return Scheduler(slots=1, queue_limit=queue_limit)


@dataclass
class StaticScheduler(Scheduler):
    """Wait until `slots` requests have come (or no more will), run them as one batch until the longest is done, repeat.

    Rows whose request is done stay in the batch as dead weight, and all answers of a batch are handed back at its end,
    as a server that calls `generate` on a padded batch does. So nobody sees a first token before that. Whoever drives the engine by
    `step` sets `closed` when no more will come. ValueError for `prefill_tokens` and `admit_per_iteration`, which would tear batches apart.
    """

    streams: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_tokens or self.admit_per_iteration:
            raise ValueError(
                f"prefill_tokens is {self.prefill_tokens} and admit_per_iteration {self.admit_per_iteration}: a static batch is "
                "processed whole, 0 allowed"
            )

    @property
    def ready(self) -> bool:
        return bool(self.running) or self._batch_complete

    @property
    def _batch_complete(self) -> bool:
        return len(self.waiting) >= self.slots or (self.closed and bool(self.waiting))

    def admit(self, fits: Fits = len) -> list[Request]:
        """A whole batch once the one before has left."""
        return super().admit(fits) if not self.running and self._batch_complete else []

    def retire(self) -> list[int]:
        """All slots, when the last of the batch is done."""
        return list(self.running) if all(generation.done for generation in self.running.values()) else []


def lone(model: Llama, requests: Sequence[Request], capacity: int) -> list[Generation]:
    """Each request decoded greedily with nothing beside it: the reference for tokens and for the time of a lone request.

    Arrival times are ignored: `service_s` is what counts.
    """
    result = []
    for request in requests:
        engine = Engine(model, serial(), capacity)
        engine.submit(request)
        while not (finished := engine.step()):
            pass
        result += finished
    return result


def divergence(model: Llama, generation: Generation, reference: Generation) -> float | None:
    """How far apart the logits of the first differing token and of the reference's token are; None for equal answers,
    infinite when one is merely the beginning of the other.

    The logits come from one prefill of the prompt and the answer so far. A gap near the rounding error of the dtype is a
    near tie, which the order of a sum decides; a wide one is a fault.
    """
    if generation.tokens == reference.tokens:
        return None
    pairs = list(zip(generation.tokens, reference.tokens, strict=False))
    at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if at is None:
        return math.inf
    context = torch.tensor([*reference.request.prompt, *reference.tokens[:at]], device=model.device)
    ours, theirs = model.prefill(context, model.new_cache(1, len(context)))[list(pairs[at])].tolist()
    return abs(theirs - ours)
