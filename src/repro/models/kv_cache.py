"""Where keys and values of requests lie: in one stretch per slot, or in blocks from a common pool. Kernels in torch use
`write` and `read`, those in C++ and Triton the `parts`, so a model runs on either. Both count in slots."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheSizes:
    """What a cache needs to know of a model, or of one tensor-parallel rank's part of it."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"


class KVCache:
    """`keys`, `values`: [layers, blocks, kv_heads, block, head_dim], zero at first. Slot i is block i, so its `capacity`
    is `block` positions.

    `table`: int64 [slots, width], the blocks of each slot in order, where they have several; else None.
    """

    table: Tensor | None = None

    def __init__(self, sizes: CacheSizes, blocks: int, block: int) -> None:
        self.layers, self.kv_heads, self.head_dim, self.capacity = sizes.layers, sizes.kv_heads, sizes.head_dim, block
        shape = (sizes.layers, blocks, sizes.kv_heads, block, sizes.head_dim)
        self.keys = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        self.values = torch.zeros_like(self.keys)

    @property
    def nbytes(self) -> int:
        """Of all keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [n, kv_heads, head_dim] of one layer at `positions` [n] of `slots` [n], both int64."""
        self.keys[layer][slots, :, positions], self.values[layer][slots, :, positions] = keys, values

    def read(self, layer: int, slots: slice, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, kv_heads, span, head_dim] at positions 0 … span-1, undefined where never written.
        Views where that is possible."""
        return self.keys[layer, slots, :, :span], self.values[layer, slots, :, :span]

    def move(self, source: int, destination: int, length: int) -> int:
        """Bring the first `length` positions of a slot to another, which is free; returns the bytes copied."""
        for part in (self.keys, self.values):
            part[:, destination, :, :length] = part[:, source, :, :length]
        return 2 * self.keys[:, source, :, :length].nbytes

    def clear(self, slot: int) -> None:
        """Zero all that lies in a slot: where NaN may be left, a mask does not keep it from who reads beyond his own."""
        self.keys[:, self._blocks(slot)] = self.values[:, self._blocks(slot)] = 0

    def _blocks(self, slot: int) -> int | list[int]:
        return slot

    def parts(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where they lie: keys and values [blocks, kv_heads, block, head_dim] of one layer, and the table."""
        return self.keys[layer], self.values[layer], self.table


class PagedCache(KVCache):
    """Blocks of `block` positions from a common pool (Kwon et al. 2023).

    A slot takes blocks with `reserve` and gives them back with `free`; `read` gathers them, so a slot that moves moves
    its row of the table only.
    """

    table: Tensor

    def __init__(self, sizes: CacheSizes, slots: int, capacity: int, blocks: int, block: int = 16) -> None:
        if block < 1 or blocks < 1:
            raise ValueError(f"blocks is {blocks} and block {block}, both must be at least 1")
        super().__init__(sizes, blocks, block)
        self.capacity, self.block = capacity, block
        # Entries that no block was given to name a slot's first: they are read (and masked), never written.
        self.table = torch.zeros((slots, self.blocks_for(capacity)), dtype=torch.int64, device=sizes.device)
        self._owned: list[list[int]] = [[] for _ in range(slots)]
        self._unused = list(range(blocks - 1, -1, -1))

    @property
    def free_blocks(self) -> int:
        return len(self._unused)

    def blocks_for(self, length: int) -> int:
        """Blocks that hold `length` positions."""
        return -(-length // self.block)

    def reserve(self, slot: int, length: int) -> None:
        """Give an empty slot blocks for `length` positions; the caller has looked that there are enough."""
        needed = self.blocks_for(length)
        assert not self._owned[slot] and needed <= len(self._unused), f"slot {slot}: {needed} blocks asked"
        self._owned[slot] = [self._unused.pop() for _ in range(needed)]
        self.table[slot] = self._owned[slot][0]  # of no other: a mask does not keep its NaN, if it has any, away
        self.table[slot, :needed] = torch.tensor(self._owned[slot], device=self.table.device)

    def free(self, slot: int) -> None:
        """Take the blocks of a slot back."""
        self._unused += reversed(self._owned[slot])
        self._owned[slot] = []

    def move(self, source: int, destination: int, length: int) -> int:
        """Exchange the tables of two slots; no keys or values are copied, so 0 bytes."""
        pair, swapped = [source, destination], [destination, source]
        self._owned[source], self._owned[destination] = self._owned[destination], self._owned[source]
        self.table[pair] = self.table[swapped]
        return 0

    def _blocks(self, slot: int) -> list[int]:
        return self._owned[slot]

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        block, inside = self.table[slots, positions // self.block], positions % self.block
        self.keys[layer][block, :, inside], self.values[layer][block, :, inside] = keys, values

    def read(self, layer: int, slots: slice, span: int) -> tuple[Tensor, Tensor]:
        """Copies, gathered block by block."""
        table = self.table[slots, : self.blocks_for(span)]
        keys, values = (part[layer][table].transpose(1, 2).flatten(2, 3) for part in (self.keys, self.values))
        return keys[:, :, :span], values[:, :, :span]
