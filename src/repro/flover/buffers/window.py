"""Contiguous KV slots: the running requests always fill one window of neighbouring slots, so that a fused iteration
reads a plain slice of the cache. When a request inside the window leaves, the paper's memory shuffle closes the hole:

Step 1: of all windows as wide as there are live slots, find the one that already holds most of them (fewest moves).
Step 2: move each live slot outside that window into a hole inside it.

A request that leaves at an edge costs nothing: the window's edge moves.
"""

from collections.abc import Sequence

from repro.flover.buffers.base import Buffers, Move


def plan_moves(live: Sequence[bool]) -> tuple[int, list[Move]]:
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
    return start, moves_into(live, start)


def moves_into(live: Sequence[bool], start: int) -> list[Move]:
    """Step 2, for the window from `start` on: as many holes inside as live slots outside, paired in order."""
    window = range(start, start + sum(live))
    outside = [slot for slot, alive in enumerate(live) if alive and slot not in window]
    holes = [slot for slot in window if not live[slot]]
    return list(zip(outside, holes, strict=True))


class WindowBuffers(Buffers):
    """The paper's layout."""

    def _moves(self, live: Sequence[bool]) -> list[Move]:
        return plan_moves(live)[1]
