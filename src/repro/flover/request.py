"""A request as it is asked, and the generation that answers it."""

import math
from dataclasses import dataclass, field
from typing import Literal

from repro.flover.fields import RequestError, number, whole_numbers
from repro.flover.sampling import GREEDY, Sampling

__all__ = ["FinishReason", "Generation", "QueueFull", "Request", "RequestError"]

FinishReason = Literal["length", "stop", "cancelled", "deadline", "error"]
LATEST_S = 1e9  # 31 years, which a process can still sleep


class QueueFull(RuntimeError):
    """Back-pressure: as many requests wait as the queue may hold. Try again later."""


@dataclass(frozen=True)
class Request:
    """`id`: a whole number of 64 bits. `prompt`: token ids. Stops after `max_new_tokens`, or sooner after one of
    `stop_tokens` (empty: never sooner).

    `arrival_s` counts from the start of serving; None: when it is submitted. `deadline_s`: so long after its arrival
    the request ends with what it has, waiting or running (None: never). `sampling`: greedy unless said. Numbers may be
    numpy's or torch's and are kept as Python's; RequestError names the field of the wrong type or out of range.
    """

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_s: float | None = None
    stop_tokens: frozenset[int] = frozenset()
    sampling: Sampling = GREEDY
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        name = number(int, "a request's id", self.id, "a whole number of 64 bits", lambda n: -(2**63) <= n < 2**63)
        who, most = f"request {name}:", self.max_new_tokens
        plain: dict[str, object] = {
            "id": name,
            "prompt": whole_numbers(f"{who} prompt", self.prompt, ordered=True),
            "max_new_tokens": number(
                int, f"{who} max_new_tokens", most, "a whole number, 1 to 2^63 - 1", lambda n: 1 <= n < 2**63
            ),
            "stop_tokens": frozenset(whole_numbers(f"{who} stop_tokens", self.stop_tokens, ordered=False)),
        }
        if not plain["prompt"]:
            raise RequestError(f"{who} the prompt is empty, at least one token is needed")
        if self.arrival_s is not None:
            allowed = f"None (when it is submitted) or 0 to {LATEST_S:g} seconds"
            plain["arrival_s"] = number(
                float, f"{who} arrival_s", self.arrival_s, allowed, lambda s: 0 <= s <= LATEST_S
            )
        if self.deadline_s is not None:
            allowed = "None (never) or above 0 seconds"
            plain["deadline_s"] = number(float, f"{who} deadline_s", self.deadline_s, allowed, lambda s: s > 0)
        if not isinstance(self.sampling, Sampling):
            raise RequestError(f"{who} sampling is of {type(self.sampling)}, must be a Sampling")
        for key, value in plain.items():  # frozen: plain assignment is refused
            object.__setattr__(self, key, value)

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

    `slot`: where it was admitted at `admitted_s`, before its prefill; -1 if it never was: then `admitted_s` is when it
    left the queue. `prefilled`: tokens of the prompt that have been processed. `longest_gap_s`: longest time between
    tokens (TBT; 0 before the second). `tokens`: of the answer, the stop token included. `finish_reason`: None while it
    goes on; "error" when its logits gave no token, or the buffers had no room for it: `cause` says which.
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
    cause: str = ""
    last_token_s: float = 0.0
    longest_gap_s: float = 0.0

    def append(self, token: int, now: float = 0.0) -> None:
        """Take the next token, and note when it is the last. Below 0: there is none to be had from its logits."""
        if token < 0:
            self.finish_reason = "error"
            self.cause = f"the logits of token {len(self.tokens)} hold NaN, or their largest is infinite"
            return
        if self.tokens:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        else:
            self.first_token_s = now
        self.last_token_s = now
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
