"""Contiguous KV slots: the running requests always fill one window of neighbouring slots, so that a fused iteration reads a
plain slice of the cache. When a request inside the window leaves, the paper's memory shuffle closes the hole:

Step 1: of all windows as wide as there are live slots, find the one that already holds most of them (fewest moves).
Step 2: move each live slot outside that window into a hole inside it.

A request that leaves at an edge costs nothing: the window's edge moves.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from repro.models.llama import Llama

__all__ = ["SlotBuffers", "plan_moves"]


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


class SlotBuffers:
    """Everything a running request owns, one row per slot.

    keys, values: [layers, slots, kv_heads, capacity, head_dim]; tokens: [slots] int64, the last token, which the next
    iteration feeds; lengths: [slots] int64, tokens whose keys and values are stored. `slot_moves` and `moved_bytes` count
    what evictions moved (KV bytes; the two integers of a slot are not counted).
    """

    def __init__(self, model: Llama, slots: int, capacity: int) -> None:
        self.capacity = capacity
        self.keys, self.values = model.new_cache(slots, capacity)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.low = self.high = 0
        self.slot_moves = self.moved_bytes = 0

    @property
    def window(self) -> slice:
        """The live slots."""
        return slice(self.low, self.high)

    def allocate(self) -> int:
        """Widen the window by a free slot: above it, or below when it has reached the last slot."""
        if self.high < len(self.tokens):
            self.high += 1
            return self.high - 1
        assert self.low > 0, "no free slot: the scheduler admitted too many"
        self.low -= 1
        return self.low

    def store(self, slot: int, token: int, length: int) -> None:
        """Note the state of a slot after its prompt of `length` tokens, whose first answer is `token`."""
        self.tokens[slot], self.lengths[slot] = token, length

    def advance(self, tokens: Tensor) -> None:
        """Note one iteration of the whole window. A dead row (static batching) stays at the last position of its slot."""
        self.tokens[self.window] = tokens
        self.lengths[self.window] = (self.lengths[self.window] + 1).clamp(max=self.capacity - 1)

    def evict(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        """Free these slots and close the window over the others; returns the moves made as (source, destination)."""
        live = [False] * len(self.tokens)
        live[self.window] = [True] * (self.high - self.low)
        for slot in slots:
            assert live[slot], f"slot {slot} is not in use"
            live[slot] = False
        start, moves = plan_moves(live)
        for source, destination in moves:
            self._move(source, destination)
        self.low, self.high = start, start + sum(live)
        return moves

    def _move(self, source: int, destination: int) -> None:
        """Copy one slot. Only the stored tokens move, for all layers: the paper's released code copied a sliver."""
        length = int(self.lengths[source])
        for cache in (self.keys, self.values):
            cache[:, destination, :, :length] = cache[:, source, :, :length]
            self.moved_bytes += cache[:, source, :, :length].nbytes
        self.tokens[destination], self.lengths[destination] = self.tokens[source], self.lengths[source]
        self.slot_moves += 1
