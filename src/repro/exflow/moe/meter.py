"""Where an iteration's time and bytes go."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from repro.comm import Ledger


@dataclass
class Iteration:
    """One decoding iteration of one rank.

    `parts`: seconds by part, which add up to the iteration's. `sent`: bytes by part and level. `rows`: rows that were
    sent to an expert, by the level that they crossed ("own": none). `computed`: rows that its experts took, by layer.
    """

    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    rows: Counter[str] = field(default_factory=Counter)
    computed: Counter[int] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class Meter:
    """Keeps what it measures inside `iteration` alone; outside of one a part still empties the ledger. A part inside
    another interrupts it; what is in no part is "other".

    `aligned`: all ranks meet before a part that communicates, so that its seconds are those of the exchange, and those
    of waiting for ranks that come late are the part "wait". An iteration is slower then.
    """

    communicating = frozenset({"all_to_all", "all_to_all_parts", "all_gather", "all_gather_kv"})

    def __init__(self, ledger: Ledger, device: torch.device) -> None:
        self.ledger, self.device, self.aligned = ledger, device, False
        self.iterations: list[Iteration] = []
        self._now = Iteration()  # outside of an iteration, one that nobody keeps
        self._part, self._since = "other", 0.0

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """All ranks begin together."""
        self.ledger.take()
        dist.barrier()
        self._now, self._part, self._since = Iteration(), "other", self._clock()
        yield
        self._enter("other")
        self.iterations.append(self._now)
        self._now = Iteration()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        outer = self._part
        if self.aligned and name in self.communicating:
            self._enter("wait")
            dist.barrier()
        self._enter(name)
        yield
        self._enter(outer)

    def _enter(self, part: str) -> None:
        """Book time and bytes since the last call to the part that ends."""
        now = self._clock()
        self._now.parts[self._part] += now - self._since
        self._now.sent[self._part].update(self.ledger.take())
        self._part, self._since = part, now

    def moves(self, counts: Tensor) -> None:
        """Note `counts[r]` rows on their way to rank r."""
        for peer, count in enumerate(counts.tolist()):
            level = self.ledger.topology.level_between(self.ledger.rank, peer)
            self._now.rows[level or "own"] += count

    def computes(self, layer: int, rows: int) -> None:
        """Note `rows` that came to this rank's experts of `layer`."""
        self._now.computed[layer] += rows

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
