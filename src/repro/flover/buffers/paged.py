"""Blocks from a common pool: only rows of a table move, and memory is taken by need, not by the longest request."""

from collections.abc import Sequence
from itertools import accumulate

from repro.flover.buffers.base import Move
from repro.flover.buffers.baseline_layouts import LastBuffers
from repro.models.decoder import Decoder
from repro.models.kv_cache import PagedCache


class PagedBuffers(LastBuffers):
    """A request gets all blocks that it may need when it is admitted, so it can never run out of them later.

    `blocks`: of the pool, of `block` positions each; None: as many as `slots` requests of full capacity take. Attention
    in C++ and Triton follows the table; in torch an iteration gathers, and so copies, what it reads. ValueError where
    either is below 1.
    """

    cache: PagedCache

    def __init__(self, model: Decoder, slots: int, capacity: int, blocks: int | None = None, block: int = 16) -> None:
        if block < 1:
            raise ValueError(f"block is {block}, must be at least 1")
        self._pool = (slots * -(-capacity // block) if blocks is None else blocks, block)
        super().__init__(model, slots, capacity)
        self.most = min(capacity, self._pool[0] * block)

    def _new_cache(self, model: Decoder) -> PagedCache:
        return model.new_paged_cache(self.slots, self.capacity, *self._pool)

    def fits(self, needed: Sequence[int]) -> int:
        blocks = accumulate(self.cache.blocks_for(length) for length in needed[: super().fits(needed)])
        return sum(total <= self.cache.free_blocks for total in blocks)

    def allocate(self, needed: int) -> int:
        slot = super().allocate(needed)
        self.cache.reserve(slot, needed)
        return slot

    def evict(self, slots: Sequence[int]) -> list[Move]:
        for slot in slots:
            self.cache.free(slot)
        return super().evict(slots)
