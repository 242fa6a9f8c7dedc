"""A request as it is asked, and the generation that answers it."""

import math
from dataclasses import dataclass, field
from typing import Literal

from repro.flover.sampling import GREEDY, Sampling

FinishReason = Literal["length", "stop", "cancelled", "deadline"]


class RequestError(ValueError):
    """A request that can never be served here: too long for a slot, or a token that the model does not know."""


class QueueFull(RuntimeError):
    """Back-pressure: as many requests wait as the queue may hold. Try again later."""


@dataclass(frozen=True)
class Request:
    """`prompt`: token ids. Stops after `max_new_tokens`, or sooner after one of `stop_tokens` (empty: never sooner).

    `arrival_s` counts from the start of serving; None: when it is submitted. `deadline_s`: so long after its arrival
    the request ends with what it has, waiting or running (None: never). `sampling`: greedy unless said.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float | None = None
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError(f"request {self.id}: the prompt is empty")
        if self.max_new_tokens < 1:
            raise RequestError(f"request {self.id}: max_new_tokens is {self.max_new_tokens}, at least 1 allowed")
        if self.arrival_s is not None and not 0 <= self.arrival_s < math.inf:
            raise RequestError(f"request {self.id}: arrival_s is {self.arrival_s}, at least 0 allowed")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise RequestError(f"request {self.id}: deadline_s is {self.deadline_s}, above 0 allowed")

    @property
    def arrived_s(self) -> float:
        """`arrival_s` of a request that has one, as all have that were submitted."""
        assert self.arrival_s is not None, f"request {self.id} was not submitted"
        return self.arrival_s

    @property
    def expiry_s(self) -> float:
        """When its deadline is over, counted like `arrival_s`; infinite without a deadline."""
        return math.inf if self.deadline_s is None else self.arrived_s + self.deadline_s

    @property
    def kv_tokens(self) -> int:
        """Positions of KV cache it may need: the last token is returned and never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Generation:
    """The answer as it grows. Times in seconds from the start of serving.

    `slot`: where it was admitted at `admitted_s`, before its prefill; -1 if it never was. `prefilled`: tokens of the
    prompt that have been processed. `finish_reason`: None while it goes on.
    """

    request: Request
    slot: int
    admitted_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    finish_s: float = 0.0
    streamed: bool = True  # tokens are handed out as they come; else all at once, when the answer is handed back
    prefilled: int = 0
    finish_reason: FinishReason | None = None

    def append(self, token: int) -> None:
        """Take the next token, and note when it is the last."""
        self.tokens.append(token)
        if token in self.request.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish_reason = "length"

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that are not processed yet."""
        return len(self.request.prompt) - self.prefilled

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    @property
    def decoding(self) -> bool:
        """Whether its prompt is done and it takes a token in every iteration."""
        return bool(self.tokens) and not self.done

    @property
    def latency_s(self) -> float:
        """From arrival until the answer was handed back."""
        return self.finish_s - self.request.arrived_s

    @property
    def service_s(self) -> float:
        """From admission until the answer was handed back: the latency without the time in the queue."""
        return self.finish_s - self.admitted_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival; without streaming it comes at the end. None when there is no token."""
        if not self.tokens:
            return None
        return (self.first_token_s if self.streamed else self.finish_s) - self.request.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token, and without streaming."""
        later = len(self.tokens) - 1
        return (self.finish_s - self.first_token_s) / later if later and self.streamed else None
