"""What attention kernels are held against each other on: a cache full of what earlier requests left, and rows."""

from collections.abc import Sequence

import torch

from repro.models.kv_cache import CacheSizes, KVCache, PagedCache
from repro.models.rows import Rows

SLOTS = 6


def full_cache(sizes: CacheSizes, capacity: int, paged: bool, block: int = 8) -> KVCache:
    """Equal ones for equal arguments. Paged slots have blocks for `capacity` positions each, not in order."""
    if paged:
        cache = PagedCache(sizes, SLOTS, capacity, SLOTS * -(-capacity // block) + 8, block)
        for slot in (3, 0, 5, 1, 4, 2):
            cache.reserve(slot, capacity)
    else:
        cache = KVCache(sizes, SLOTS, capacity)
    generator = torch.Generator().manual_seed(1)
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return cache


def rows(decoding: Sequence[int], prompts: Sequence[tuple[int, int]], first: int = 0, device: str = "cpu") -> Rows:
    """Slots from `first` on decode at these positions; those after them process prompts of (start, tokens)."""

    def tokens(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int64, device=device)

    after, parts = first + len(decoding), []
    if decoding:
        positions = torch.tensor(decoding, device=device)
        parts.append(Rows.decode(tokens(len(decoding)), positions, slice(first, after), max(decoding)))
    parts += [Rows.prompt(tokens(count), slot, start) for slot, (start, count) in enumerate(prompts, after)]
    return Rows.joined(parts)


def decode(model, tokens, lengths, cache, slots: slice, longest: int) -> torch.Tensor:
    """Logits [b, vocab]: a token for each of b neighbouring slots, which hold `lengths` [b] tokens."""
    return model.forward(Rows.decode(tokens, lengths, slots, longest), cache)
