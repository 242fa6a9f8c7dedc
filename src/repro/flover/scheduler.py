"""Who runs in the next iteration: the whole policy.

First come, first served. A request waits in the queue until a token boundary with a free slot, then runs until its own
last token; nobody is preempted, nobody waits for a batch to form or to end (paper: section on temporal fusion).

Every request that decodes is in every pass, and prompts fill the pass up, in order of arrival, to a budget of tokens
(chunked prefill and decode-maximal batches, SARATHI, arXiv 2308.16369). So a prompt delays nobody's next token by more
than a pass, and has its own first token with its own last chunk.
"""

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

from repro.flover.budget import Budget
from repro.flover.fields import number
from repro.flover.request import Generation, QueueFull, Request

Fits = Callable[[Sequence[int]], int]


@dataclass
class Scheduler:
    """`slots` requests run at once, `queue_limit` wait. 0 is no limit in what follows.

    `admit_per_iteration`: requests admitted at one token boundary; Flover's authors admit one. `kv_tokens`: limit on
    the summed maximum KV length of running requests. `token_gap_s`: target for the time between tokens (TBT), seconds
    that a pass with decoding requests should take at most; `budget` tells how many prompt tokens fit, from the times of
    the passes before. `prefill_tokens`: a fixed limit on the prompt tokens of any pass. ValueError for `slots` or
    `queue_limit` below 1, for another limit below 0 or infinite, and for a count of tokens or requests that is no whole
    number.
    """

    streams: ClassVar[bool] = True  # a token can be handed out as soon as it is there
    slots: int
    queue_limit: int = 1024
    admit_per_iteration: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    token_gap_s: float = 0.2  # five tokens a second: faster than people read
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[int, Generation] = field(default_factory=dict)  # by its slot now, in order of admission
    closed: bool = False  # no further request will come
    budget: Budget = field(init=False)

    def __post_init__(self) -> None:
        least = {"slots": 1, "queue_limit": 1, "admit_per_iteration": 0, "kv_tokens": 0, "prefill_tokens": 0}
        for name, lowest in least.items():
            allowed = f"at least {lowest}, a whole number"
            holds = functools.partial(operator.le, lowest)
            setattr(self, name, number(int, name, getattr(self, name), allowed, holds, ValueError))
        self.budget = Budget(self.token_gap_s)

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; QueueFull when it has reached its limit."""
        if len(self.waiting) >= self.queue_limit:
            raise QueueFull(f"request {request.id}: {len(self.waiting)} requests wait, the queue's limit")
        self.waiting.append(request)

    @property
    def ready(self) -> bool:
        """Whether a step would do anything; if not, time passes until the next arrival."""
        return bool(self.waiting or self.running)

    def admit(self, fits: Fits = len) -> list[Request]:
        """Requests that start at this token boundary, in order of arrival, until one does not fit; they leave the
        queue.

        `fits`: how many of the next requests, given the KV positions that each may need, the buffers have room for.
        """
        room = min(self.slots - len(self.running), self.admit_per_iteration or self.slots, len(self.waiting))
        needed = [self.waiting[i].kv_tokens for i in range(self._begun(room))]
        if self.kv_tokens:
            held = sum(generation.request.kv_tokens for generation in self.running.values())
            needed = [n for n, total in zip(needed, accumulate(needed), strict=True) if held + total <= self.kv_tokens]
        return [self.waiting.popleft() for _ in range(fits(needed))]

    @property
    def prompt_tokens(self) -> int:
        """How many prompt tokens the next pass may process."""
        most = self.budget.tokens
        if not any(generation.decoding for generation in self.running.values()):
            # No request decodes, so no token is delayed: the pass may take the whole of the first prompt.
            begun = (g.prompt_left for g in self.running.values() if g.prompt_left and not g.done)
            most = max(most, next(begun, len(self.waiting[0].prompt) if self.waiting else 0))
        return min(most, self.prefill_tokens or most)

    def _begun(self, room: int) -> int:
        """How many of the next `room` prompts the next pass gets to. The others need no slot yet."""
        before, most = sum(g.prompt_left for g in self.running.values() if not g.done), self.prompt_tokens
        lengths = [len(self.waiting[i].prompt) for i in range(room)]
        return sum(tokens < most for tokens in accumulate(lengths[:-1], initial=before)) if room else 0

    @property
    def next_deadline(self) -> float:
        """When the first of those who wait is late; infinite when none can be."""
        return min((request.expiry_s for request in self.waiting), default=math.inf)

    def expired(self, now: float) -> list[Request]:
        """Take those that wait longer than their deadline out of the queue."""
        late = [r for r in self.waiting if r.deadline_s is not None and now >= r.expiry_s]
        for request in late:
            self.waiting.remove(request)
        return late

    def retire(self) -> list[int]:
        """Slots to evict at this token boundary: those whose request has ended, for whatever `finish_reason`."""
        return [slot for slot, generation in self.running.items() if generation.done]
