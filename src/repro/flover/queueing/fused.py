"""In-flight batching (the paper's temporal fusion) as a discrete-event model, request by request what `Engine` does."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from repro.flover.arrivals import RequestShape
from repro.flover.budget import Budget
from repro.flover.queueing.result import QueueRun, arrivals_of
from repro.flover.queueing.times import Times, check_least, pass_s


@dataclass(frozen=True)
class Fused:
    """Newcomers join at the next token boundary, who is done leaves at once. 0 is no limit.

    `slots`: most that run at once, 1 for serial; `admit_per_iteration`: newcomers at one boundary, 1 in the authors'
    code; `prefill_tokens`: limit on the prompt tokens of one iteration; `token_gap_s`: on the seconds of one in which
    somebody decodes, which decides on its prompt tokens as `flover.budget` does (both are chunked prefill).
    `prefill_apart`: prompts are processed beside the iterations, as on the authors' second stream, one after another
    and without slowing them down; a request joins when its prompt is done, and takes a slot only then. ValueError for a
    limit below 0, and for `prefill_tokens` or `token_gap_s` with `prefill_apart`.
    """

    slots: int = 0
    admit_per_iteration: int = 0
    prefill_tokens: int = 0
    prefill_apart: bool = False
    token_gap_s: float = 0.0

    def __post_init__(self) -> None:
        check_least(self, slots=0, admit_per_iteration=0, prefill_tokens=0, token_gap_s=0)
        for name in ("prefill_tokens", "token_gap_s"):
            if self.prefill_apart and (limit := getattr(self, name)):
                raise ValueError(f"{name} is {limit}: with prefill_apart only 0 is allowed")

    def run(self, shapes: Sequence[RequestShape], times: Times) -> QueueRun:
        return _Fused(self, shapes, times).run()


class _Fused:
    """One run. Iterations are counted from 0; what a request needs is kept as the number at which it ends."""

    def __init__(self, policy: Fused, shapes: Sequence[RequestShape], times: Times) -> None:
        self.arrival = arrivals_of(shapes)
        self.shapes, self.times = shapes, times
        self.slots = policy.slots or len(shapes)
        self.most = policy.admit_per_iteration or len(shapes)
        self.chunk, self.budget = policy.prefill_tokens, Budget(policy.token_gap_s)
        self.apart = prompts_apart(shapes, times) if policy.prefill_apart else None
        self.joins = self.apart or self.arrival  # when each can be admitted
        self.now, self.iteration, self.rows, self.following = 0.0, 0, 0, 0
        self.prompts: deque[int] = deque()  # those whose prompt is not done, in order
        self.prefilled = [0] * len(shapes)
        self.ends: dict[int, int] = {}  # those who decode: the iteration before which they are done
        self.lead: dict[int, int] = {}  # and how far their context is ahead of the number of the iteration
        self.admitted, self.first, self.finish = (np.zeros(len(shapes)) for _ in range(3))

    def run(self) -> QueueRun:
        """What happens between two boundaries, in the order of `Engine.step`."""
        while self.following < len(self.shapes) or self.prompts or self.ends:
            self._admit()
            self._retire()  # an answer of one token whose prompt was processed apart
            if self.prompts:
                self._pass()
            elif self.ends:
                self._decode()
            self._retire()
        first = self.first if self.apart is None else np.array(self.apart)
        return QueueRun(np.array(self.arrival), self.admitted, first, self.finish, self.iteration, self.rows)

    def _admit(self) -> None:
        if not self.ends and not self.prompts:
            self.now = max(self.now, self.joins[self.following])
        waiting = bisect_right(self.joins, self.now) - self.following
        room = min(waiting, self.slots - len(self.ends) - len(self.prompts), self.most)
        room = self._begun(room) if self.apart is None else room
        for request in range(self.following, self.following + room):
            self.admitted[request] = self.now
            if self.apart is None:
                self.prompts.append(request)
            else:
                self._begin(request)
        self.following += room

    def _prompt_tokens(self) -> int:
        """How many prompt tokens the next pass may process."""
        most = self.budget.tokens
        if not self.ends:  # nobody decodes
            first = self.prompts[0] if self.prompts else self.following
            most = max(most, self._left([first]))
        return min(most, self.chunk or most)

    def _begun(self, room: int) -> int:
        """How many of the next `room` prompts the next pass gets to."""
        if not room:
            return 0
        ahead, most = self._left(self.prompts), self._prompt_tokens()
        newcomers = self.shapes[self.following : self.following + room - 1]
        return sum(tokens < most for tokens in accumulate((s.prompt_tokens for s in newcomers), initial=ahead))

    def _left(self, requests: Iterable[int]) -> int:
        """Tokens of their prompts that are not processed yet."""
        return sum(self.shapes[request].prompt_tokens - self.prefilled[request] for request in requests)

    def _pass(self) -> None:
        """Prompts, or what of them may be, and an iteration of those who decode."""
        left = self._prompt_tokens()
        chunks, complete = [], []
        for request in self.prompts:
            shape, start = self.shapes[request], self.prefilled[request]
            if not (tokens := min(shape.prompt_tokens - start, left)):
                break
            chunks.append((tokens, start))
            left -= tokens
            self.prefilled[request] += tokens
            if self.prefilled[request] == shape.prompt_tokens:
                complete.append(request)
        batch, longest = len(self.ends), self.iteration + max(self.lead.values(), default=0)
        seconds = pass_s(self.times, batch, longest, chunks)
        self.now += seconds
        self.budget.timed(sum(tokens for tokens, _ in chunks), seconds)
        self.rows += batch
        self.iteration += bool(batch)
        for request in complete:
            self.prompts.popleft()
            self._begin(request)

    def _begin(self, request: int) -> None:
        """Its prompt is done, it has its first token."""
        shape = self.shapes[request]
        self.first[request] = self.now
        self.ends[request] = self.iteration + shape.output_tokens - 1
        self.lead[request] = shape.prompt_tokens - self.iteration

    def _retire(self) -> None:
        for request in [request for request, end in self.ends.items() if end == self.iteration]:
            self.finish[request] = self.now
            del self.ends[request], self.lead[request]

    def _decode(self) -> None:
        """As many iterations as have the same rows: until one is done, or a boundary finds somebody to admit."""
        longest = self.iteration + max(self.lead.values())
        most = min(self.ends.values()) - self.iteration
        free = self.following < len(self.joins) and len(self.ends) < self.slots
        joins = self.joins[self.following] if free else np.inf  # nobody can, before one is done
        if joins <= self.now:
            most = 1
        durations = self.times.decode(len(self.ends), longest + np.arange(most))
        # Summed up one by one from now on, as a clock does: rounding decides alike who was in time for a boundary.
        edges = np.cumsum(np.concatenate(([self.now], durations)))
        steps = min(most, max(1, int(np.searchsorted(edges, joins))))
        self.now = float(edges[steps])
        self.iteration += steps
        self.rows += steps * len(self.ends)


def prompts_apart(shapes: Sequence[RequestShape], times: Times) -> list[float]:
    """When each prompt is done where they are processed one after another, beside all else."""
    done, now = [], 0.0
    for shape in shapes:
        now = max(now, shape.arrival_s) + times.prefill(shape.prompt_tokens)
        done.append(now)
    return done
