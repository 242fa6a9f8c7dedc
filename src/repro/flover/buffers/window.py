"""Contiguous KV slots: the running requests always fill one window of neighbouring slots, so that a fused iteration
reads a plain slice of the cache. When a request inside the window leaves, the paper's memory shuffle closes the hole:

Step 1: of all windows as wide as there are live slots, find the one that already holds most of them (fewest moves).
Step 2: move each live slot outside that window into a hole inside it.

A request that leaves at an edge costs nothing: the window's edge moves.
"""

from collections.abc import Sequence

from repro.flover.buffers.base import Buffers, Move

__all__ = ["WindowBuffers", "plan_moves"]


def plan_moves(live: Sequence[bool]) -> tuple[int, list[tuple[int, int]]]:
    """The window with the fewest moves, in O(slots); the lowest such window when several tie.

    live: one flag per slot. Returns the window's first slot (its width is the number of live slots) and the moves
    (source slot, destination slot), which touch every slot at most once.
    """
    width = sum(live)
    # Step 1: slide the window by one slot at a time; only its two edges change the count.
    inside = best = sum(live[:width])
    start = 0
    for first in range(1, len(live) - width + 1):
        inside += live[first + width - 1] - live[first - 1]
        if inside > best:
            best, start = inside, first
    # Step 2: as many holes inside as live slots outside, paired in order.
    window = range(start, start + width)
    outside = [slot for slot, alive in enumerate(live) if alive and slot not in window]
    holes = [slot for slot in window if not live[slot]]
    return start, list(zip(outside, holes, strict=True))


class WindowBuffers(Buffers):
    """The paper's layout."""

    @property
    def _live(self) -> int:
        return self.high - self.low

    def _allocate(self, needed: int) -> int:
        """Widen the window by a free slot: above it, or below when it has reached the last slot."""
        if self.high < self.slots:
            self.high += 1
            return self.high - 1
        assert self.low > 0, "no free slot: the scheduler admitted too many"
        self.low -= 1
        return self.low

    def evict(self, slots: Sequence[int]) -> list[Move]:
        """Close the window over the others."""
        live = [False] * self.slots
        live[self.window] = [True] * self._live
        for slot in slots:
            assert live[slot], f"slot {slot} is not in use"
            live[slot] = False
        start, moves = plan_moves(live)
        for source, destination in moves:
            self._move(source, destination)
        self.low, self.high = start, start + sum(live)
        return moves
