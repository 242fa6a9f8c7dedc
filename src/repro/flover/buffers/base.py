"""What running requests own, one row per slot: the interface of all layouts. Running requests always lie in one window
of neighbouring slots, so that an iteration reads plain slices; layouts differ in how a request leaves its middle."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from repro.models.decoder import Decoder
from repro.models.kv_cache import KVCache

Move = tuple[int, int]  # source slot, destination slot


class Buffers(ABC):
    """`tokens`: [slots] int64, the last token of each request, which the next iteration feeds; `lengths`: [slots]
    int64, tokens whose keys and values are stored in `cache`. `slot_moves` and `moved_bytes` count what evictions moved
    (KV bytes; the integers of a slot are not counted). `most`: positions that one request may need at most to be served.
    """

    cache: KVCache

    def __init__(self, model: Decoder, slots: int, capacity: int) -> None:
        self.slots, self.capacity, self.most = slots, capacity, capacity
        self.cache = self._new_cache(model)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=model.device)
        self._last = torch.zeros(slots, dtype=torch.int64, device=model.device)  # position that a slot may hold at most
        self._lengths = np.zeros(slots, np.int64)  # `lengths` on the host, so that nobody has to ask the device
        self._live = np.zeros(slots, bool)  # in use
        self.slot_moves = self.moved_bytes = 0

    def _new_cache(self, model: Decoder) -> KVCache:
        return model.new_cache(self.slots, self.capacity)

    @property
    def window(self) -> slice:
        """From the first live slot to the last, dead rows and unfinished prompts between them included."""
        live = np.flatnonzero(self._live)
        return slice(int(live[0]), int(live[-1]) + 1) if len(live) else slice(0, 0)

    def fits(self, needed: Sequence[int]) -> int:
        """How many of the next requests, of up to `needed` positions each, get a slot (and, if paged, blocks) now."""
        return min(len(needed), self.slots - int(self._live.sum()))

    def allocate(self, needed: int) -> int:
        """A slot for a request that may come to hold `needed` positions: the next above the window, the next below it
        when it has reached the last slot, or a dead row when it has reached both ends. The window widens to it."""
        assert not self._live.all(), "no free slot: the scheduler admitted too many"
        window = self.window
        if window.stop < self.slots:
            slot = window.stop
        else:
            slot = window.start - 1 if window.start > 0 else int(self._live.argmin())
        self._live[slot] = True
        self._last[slot] = needed - 1
        self.store(slot, 0, 0)
        return slot

    def evict(self, slots: Sequence[int]) -> list[Move]:
        """Free these slots; returns what had to move for it, in the order in which it was moved."""
        assert self._live[list(slots)].all(), f"slots {slots} are not all in use"
        self._live[list(slots)] = False
        moves = self._moves(self._live.tolist())
        for source, destination in moves:
            self._move(source, destination)
        return moves

    @abstractmethod
    def _moves(self, live: Sequence[bool]) -> list[Move]:
        """What the layout moves, when requests have left, given a flag per slot. A destination is free by then,
        and no slot moves twice."""

    def longest(self, slots: slice) -> int:
        """The most tokens that one of these has stored, or more where a dead row stands still."""
        return int(self._lengths[slots].max())

    def store(self, slot: int, token: int, length: int) -> None:
        """Note the state of a slot whose first `length` tokens are stored, and the token to feed next."""
        self.tokens[slot], self.lengths[slot], self._lengths[slot] = token, length, length

    def clear(self, slot: int) -> None:
        """Clear a slot whose keys and values may hold NaN. Kernels in torch read beyond what is stored: a mask takes
        what they read times 0, which is NaN again, for whoever gets the slot next."""
        self.tokens[slot] = 0
        self.cache.clear(slot)

    def advance(self, windows: Sequence[slice], tokens: Tensor) -> None:
        """Note one more token for each slot of these windows, in order. A dead row stays at its last position."""
        for slots in windows:
            count = slots.stop - slots.start
            self.tokens[slots], tokens = tokens[:count], tokens[count:]
            self.lengths[slots] = torch.minimum(self.lengths[slots] + 1, self._last[slots])
            self._lengths[slots] = (self._lengths[slots] + 1).clip(max=self.capacity - 1)

    def _move(self, source: int, destination: int) -> None:
        """Move one slot. Only the stored tokens move, for all layers: the paper's released code copies a sliver."""
        self.moved_bytes += self.cache.move(source, destination, int(self._lengths[source]))
        for state in (self.tokens, self.lengths, self._last, self._lengths, self._live):
            state[destination] = state[source]
        self._live[source] = False
        self.slot_moves += 1
