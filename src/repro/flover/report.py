"""What `Engine.serve` returns, and which of several passes over the same requests counts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from repro.flover.request import Generation


@dataclass
class ServingReport:
    """`generations`: the answers, by request id when serving is over; `rejected`: reason by request id. `total_seconds`:
    from the start to the last finish. `iterations`: passes with at least one decoding request; `rows`: their slots,
    summed up; `dead_rows`: those that gave no token. `slot_moves`, `moved_bytes`: slots that evictions moved, and the
    bytes of their keys and values. `cache_bytes`: keys and values of all slots."""

    generations: list[Generation] = field(default_factory=list)
    rejected: dict[int, str] = field(default_factory=dict)
    total_seconds: float = 0.0
    iterations: int = 0
    rows: int = 0
    dead_rows: int = 0
    slot_moves: int = 0
    moved_bytes: int = 0
    cache_bytes: int = 0

    @property
    def failed(self) -> dict[int, str]:
        """Cause by request id, of those whose answer broke off."""
        return {g.request.id: g.cause for g in self.generations if g.finish_reason == "error"}


def repeated(serve: Callable[[], ServingReport], passes: int, short_s: float = math.inf) -> list[ServingReport]:
    """Of so many passes over the requests, or of the first alone where it takes `short_s` seconds or more."""
    first = serve()
    more = passes - 1 if first.total_seconds < short_s else 0
    return [first, *(serve() for _ in range(more))]


def middle(passes: Sequence[ServingReport]) -> ServingReport:
    """The pass whose total time is the median (the lower one of an even number), so that all its times are of one run."""
    return sorted(passes, key=lambda report: report.total_seconds)[(len(passes) - 1) // 2]
