"""What a token costs that is decoded beside a chunk of a prompt (SARATHI: decode-maximal batching)."""

import itertools
import time

import pandas as pd

from repro.experiments.sarathi_prefill import SWEEPS, PrefillMetrics, PrefillPoint
from repro.flover.engine import Engine
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.models.decoder import Decoder

TURNS = 48  # in a sweep
KINDS = ("decode", "chunk", "mixed")


def measured(point: PrefillPoint, model: Decoder) -> tuple[PrefillMetrics, pd.DataFrame]:
    """Three passes after one another, so often: who decodes alone, a chunk alone, and both in one. Every chunk begins a
    prompt. The series has a row per turn. Each sweep begins anew, so in all of them those who decode have as much stored.
    """
    table = pd.DataFrame([turn for _ in range(point.rounds * SWEEPS) for turn in _sweep(point, model)])
    median = table.median()
    metrics = PrefillMetrics(
        **{f"{kind}_pass_s": median[kind] for kind in KINDS},
        token_alone_s=median["decode"] / point.decodes,
        token_beside_s=(table["mixed"] - table["chunk"]).median() / point.decodes,
    )
    return metrics, table


def _sweep(point: PrefillPoint, model: Decoder) -> list[dict[str, float]]:
    """Seconds of each kind of pass, by turn."""
    beside, alone = Passes(point, model, point.decodes), Passes(point, model, 0)
    steps = {"decode": beside.decode, "chunk": alone.chunk, "mixed": beside.chunk}
    for kind in KINDS:  # warm-up, thrown away
        steps[kind]()
    return [{kind: steps[kind]() for kind in KINDS} for _ in range(TURNS)]


class Passes:
    """An engine in which `decodes` requests of so many stored tokens decode throughout a sweep."""

    def __init__(self, point: PrefillPoint, model: Decoder, decodes: int) -> None:
        self.point, self.ids = point, itertools.count()
        steps = 2 * (TURNS + 2)
        capacity = max(point.prompt_tokens + steps + decodes + 1, point.chunk)
        self.engine = Engine(model, Scheduler(decodes + 1, token_gap_s=0), capacity)
        for _ in range(decodes):
            self.engine.submit(self._request(point.prompt_tokens, steps + 1))
        if decodes:
            self.engine.step()  # the prompts

    def _request(self, prompt: int, new: int) -> Request:
        number = next(self.ids)
        return Request(number, tuple((7 * number + at) % 1000 for at in range(prompt)), new)

    def decode(self) -> float:
        """Seconds of a pass in which all decode."""
        began = time.perf_counter()
        self.engine.step()
        return time.perf_counter() - began

    def chunk(self) -> float:
        """Seconds of the same with a chunk of a prompt in it, whose request leaves with its first token."""
        self.engine.submit(self._request(self.point.chunk, 1))
        return self.decode()
