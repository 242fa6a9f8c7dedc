"""What `repro place` searches for, in the seconds that the command has."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from repro.cli.clock import Clock

if TYPE_CHECKING:  # loading these takes a second, and `repro --help` waits for none
    import numpy as np

    from repro.exflow import Placement, Replicas, Trace
    from repro.exflow.levels import Levels
    from repro.exflow.spread import Needed
    from repro.topology import Topology

SEARCH_SHARE = 0.9  # of the seconds that are left after reading; the others are for the numbers, above all the bound
COPIES_SHARE = 0.5  # instead, where copies follow
TOKENS_SHARE = 0.7  # of a search's, when one on whole tokens follows the one on pairs


@dataclass(frozen=True)
class Search:
    """Routing, its counts of transitions, the GPUs for the experts, and what all searches of a command share.

    machine, gpus_per_node, costs  of hops: as given, for `exflow.place`; `levels` is what these make
    limited                        by seconds: those of the `clock`; else each search by its own rounds
    seed, progress, clock          of all searches
    """

    routing: "Trace"
    counts: "np.ndarray"
    machine: "int | Topology"
    gpus_per_node: int | None
    costs: list[float] | None
    levels: "Levels"
    max_load: float | None
    extra_slots: int
    dispatch: str
    rounds: int | None
    limited: bool
    seed: int
    progress: Callable[[float, str], None]
    clock: Clock

    def tokens_needed(self) -> "Needed":
        """How many tokens to record. A part of them may not allow the load that all do."""
        from repro import exflow

        asked = {"rounds": self.rounds, "costs": self.costs, "max_load": self.max_load, "where_possible": True}
        return exflow.tokens_needed(self.routing, self.machine, self.gpus_per_node, **asked, **self.common)

    def front(self) -> "list[Replicas]":
        """Placements from the most even to the one with the fewest hops."""
        from repro import exflow

        return exflow.serving_front(
            self.routing, self.machine, self.gpus_per_node, self.extra_slots, **self._of_copies()
        )

    def experts(self, method: str, objective: str) -> "Placement":
        """One GPU for each expert. What is counted on whole tokens begins with what is best for their pairs."""
        from repro import exflow

        on_tokens = objective != "hops"
        limit = self._seconds(COPIES_SHARE if self.extra_slots else SEARCH_SHARE)
        pairs = exflow.place(
            self.counts,
            self.machine,
            self.gpus_per_node,
            method,
            costs=self.costs,
            max_load=self.max_load,
            where_possible=self.extra_slots > 0,
            rounds=self.rounds,
            time_limit_s=None if limit is None else limit * (1 - TOKENS_SHARE * on_tokens),
            **self.common,
        )
        if not on_tokens:
            return pairs
        limits = {} if limit is None else {"time_limit_s": limit * TOKENS_SHARE}
        ends = self.levels.costs[0], self.levels.costs[-1]
        tokens = exflow.place_for_fanout(self.routing, pairs, objective, ends, **limits, **self.common)
        return replace(tokens, seconds=pairs.seconds + tokens.seconds)

    def copies(self, start: "Placement | Replicas", moves: int | None = None) -> "Replicas":
        """GPUs for each expert and its copies, `start` changed, by at most so many `moves` where they are counted."""
        from repro import exflow

        asked = {"start": start, "moves": moves, "max_load": self.max_load} | self._of_copies()
        return exflow.place_copies(self.routing, self.machine, self.gpus_per_node, self.extra_slots, **asked)

    @property
    def common(self) -> dict[str, Any]:
        return {"seed": self.seed, "progress": self.progress, "clock": self.clock}

    def _of_copies(self) -> dict[str, Any]:
        asked = {"dispatch": self.dispatch, "costs": self.costs, "rounds": self.rounds}
        return asked | {"time_limit_s": self._seconds(SEARCH_SHARE)} | self.common

    def _seconds(self, share: float) -> float | None:
        return self.clock.share(share) if self.limited else None
