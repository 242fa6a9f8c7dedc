"""Layouts to compare the paper's with: one that never moves anything, and two that keep the window at slot 0."""

from collections.abc import Sequence

from repro.flover.buffers.base import Buffers, Move
from repro.flover.buffers.window import moves_into


class FixedBuffers(Buffers):
    """No reordering, the paper's own baseline: a slot freed in the middle stays in the window as a dead row until it is
    at an edge. Newcomers widen the window; a dead row is used again only when both edges have reached the ends."""

    def _moves(self, live: Sequence[bool]) -> list[Move]:
        return []


class ShiftBuffers(Buffers):
    """All slots above a hole move down, so that requests stay in the order in which they came: from slot 0 on."""

    def _moves(self, live: Sequence[bool]) -> list[Move]:
        left = [slot for slot, alive in enumerate(live) if alive]
        return [(source, place) for place, source in enumerate(left) if source != place]


class LastBuffers(Buffers):
    """The last slots move into the holes: at most one move for each that leaves. Those left begin at slot 0."""

    def _moves(self, live: Sequence[bool]) -> list[Move]:
        return moves_into(live, 0)
