"""Who runs in the next iteration: the whole policy.

First come, first served. A request waits in the queue until a token boundary with a free slot, then runs until its own
last token; nobody is preempted, nobody waits for a batch to form or to end (paper: section on temporal fusion).
"""

import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

from repro.flover.fields import number
from repro.flover.request import Generation, QueueFull, Request

Fits = Callable[[Sequence[int]], int]


@dataclass
class Scheduler:
    """`slots` requests run at once, `queue_limit` wait. 0 is no limit in what follows.

    `admit_per_iteration`: requests admitted at one token boundary; the authors' code admits one. `kv_tokens`: limit on
    the summed maximum KV length of running requests. `prefill_tokens` (chunked prefill): limit on the prompt tokens of
    one iteration, so that a long prompt does not stall the requests that decode. ValueError for a limit that is below 0,
    or no whole number.
    """

    streams: ClassVar[bool] = True  # a token can be handed out as soon as it is there
    slots: int
    queue_limit: int = 1024
    admit_per_iteration: int = 0
    kv_tokens: int = 0
    prefill_tokens: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[int, Generation] = field(default_factory=dict)  # by the slot where it lies now
    closed: bool = False  # no further request will come

    def __post_init__(self) -> None:
        least = {"slots": 1, "queue_limit": 1, "admit_per_iteration": 0, "kv_tokens": 0, "prefill_tokens": 0}
        for name, lowest in least.items():
            allowed = f"at least {lowest}, a whole number"
            holds = functools.partial(operator.le, lowest)
            setattr(self, name, number(int, name, getattr(self, name), allowed, holds, ValueError))

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
        room = min(room, self._prompts_to_begin()) if self.prefill_tokens else room
        needed = [self.waiting[i].kv_tokens for i in range(room)]
        if self.kv_tokens:
            held = sum(generation.request.kv_tokens for generation in self.running.values())
            needed = [n for n, total in zip(needed, accumulate(needed), strict=True) if held + total <= self.kv_tokens]
        return [self.waiting.popleft() for _ in range(fits(needed))]

    def _prompts_to_begin(self) -> int:
        """Waiting requests whose prompts this iteration gets to. The others need no slot yet."""
        started = sum(g.prompt_left for g in self.running.values() if not g.done)
        before = accumulate((len(request.prompt) for request in self.waiting), initial=started)
        return sum(tokens < self.prefill_tokens for tokens in list(before)[:-1])

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
        """Slots to evict at this token boundary: those whose request has its last token."""
        return [slot for slot, generation in self.running.items() if generation.done]
