"""Layouts to compare the paper's with: one that never moves anything, and two that keep the window at slot 0."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from repro.flover.buffers.base import Buffers, Move
from repro.models.decoder import Decoder


class FixedBuffers(Buffers):
    """No reordering, the paper's own baseline: a slot freed in the middle stays in the window as a dead row until it is
    at an edge. Newcomers widen the window; a dead row is used again only when both edges have reached the ends."""

    def __init__(self, model: Decoder, slots: int, capacity: int) -> None:
        super().__init__(model, slots, capacity)
        self._used = np.zeros(slots, bool)

    @property
    def _live(self) -> int:
        return int(self._used.sum())

    def _allocate(self, needed: int) -> int:
        if self.low == self.high:
            self.low = self.high = 0
        if self.high < self.slots:
            slot = self.high
        elif self.low > 0:
            slot = self.low - 1
        else:
            assert not self._used.all(), "no free slot: the scheduler admitted too many"
            slot = int(self._used.argmin())
        self._used[slot] = True
        self.low, self.high = min(self.low, slot), max(self.high, slot + 1)
        return slot

    def evict(self, slots: Sequence[int]) -> list[Move]:
        for slot in slots:
            assert self._used[slot], f"slot {slot} is not in use"
            self._used[slot] = False
        live = np.flatnonzero(self._used)
        self.low, self.high = (int(live[0]), int(live[-1]) + 1) if len(live) else (0, 0)
        return []


class CompactBuffers(Buffers):
    """Live slots are always 0 … n-1."""

    @property
    def _live(self) -> int:
        return self.high

    def _allocate(self, needed: int) -> int:
        assert self.high < self.slots, "no free slot: the scheduler admitted too many"
        self.high += 1
        return self.high - 1

    def evict(self, slots: Sequence[int]) -> list[Move]:
        gone = set(slots)
        assert len(gone) == len(slots) and gone <= set(range(self.high)), f"slots {slots} are not all in use"
        moves = self._moves([slot for slot in range(self.high) if slot not in gone])
        for source, destination in moves:
            self._move(source, destination)
        self.high -= len(slots)
        return moves

    @abstractmethod
    def _moves(self, left: list[int]) -> list[Move]:
        """What brings the slots `left`, in ascending order, to 0 … len(left) - 1."""


class ShiftBuffers(CompactBuffers):
    """All slots above a hole move down, so that requests stay in the order in which they came."""

    def _moves(self, left: list[int]) -> list[Move]:
        return [(source, place) for place, source in enumerate(left) if source != place]


class LastBuffers(CompactBuffers):
    """The last slots move into the holes: at most one move for each that leaves."""

    def _moves(self, left: list[int]) -> list[Move]:
        outside = [slot for slot in left if slot >= len(left)]
        holes = sorted(set(range(len(left))) - set(left))
        return list(zip(outside, holes, strict=True))
