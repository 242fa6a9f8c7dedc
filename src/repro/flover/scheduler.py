"""Who runs in the next iteration: the whole policy.

First come, first served. A request waits in the queue until a token boundary with a free slot, then runs until its own
last token; nobody is preempted, nobody waits for a batch to form or to end (paper: section on temporal fusion).
"""

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from repro.flover.request import Generation, QueueFull, Request


@dataclass
class Scheduler:
    """`slots` requests run at once, `queue_limit` wait. At a boundary as many are admitted as fit, or at most
    `admit_per_iteration` of them when that is not 0; the authors' code admits one."""

    streams: ClassVar[bool] = True  # a token can be handed out as soon as it is there
    slots: int
    queue_limit: int = 1024
    admit_per_iteration: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    running: dict[int, Generation] = field(default_factory=dict)  # by the slot where it lies now
    closed: bool = False  # no further request will come

    def __post_init__(self) -> None:
        if self.slots < 1 or self.queue_limit < 1 or self.admit_per_iteration < 0:
            raise ValueError(
                f"slots {self.slots} and queue_limit {self.queue_limit} must be at least 1, "
                f"admit_per_iteration {self.admit_per_iteration} at least 0"
            )

    def submit(self, request: Request) -> None:
        """Put a request at the end of the queue; QueueFull when it has reached its limit."""
        if len(self.waiting) >= self.queue_limit:
            raise QueueFull(f"request {request.id}: {len(self.waiting)} requests wait, the queue's limit")
        self.waiting.append(request)

    @property
    def ready(self) -> bool:
        """Whether a step would do anything; if not, time passes until the next arrival."""
        return bool(self.waiting or self.running)

    def admit(self) -> list[Request]:
        """Requests to prefill at this token boundary, in order of arrival; they leave the queue."""
        room = min(self.slots - len(self.running), self.admit_per_iteration or self.slots)
        return [self.waiting.popleft() for _ in range(min(room, len(self.waiting)))]

    def retire(self) -> list[int]:
        """Slots to evict at this token boundary: those whose request has its last token."""
        return [slot for slot, generation in self.running.items() if generation.done]
