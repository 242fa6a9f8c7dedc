"""What one pass through a decoder processes: a row per token, whoever it belongs to. Tokens that running requests
decode and tokens of prompts stand side by side, so that weights are read once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Neighbouring rows that attention may take as one rectangle: `tokens` successive ones of each of the neighbouring
    `slots`. `longest`: at least the largest position among them; known to the caller, so the device is not asked.
    `prompt`: they are tokens of prompts, not decoded ones. Kernels may sum the two in different orders, so a prompt's
    last token, alone in its chunk, is still one of a prompt."""

    slots: slice
    tokens: int
    longest: int
    prompt: bool = False

    @property
    def rows(self) -> int:
        return (self.slots.stop - self.slots.start) * self.tokens


@dataclass(frozen=True)
class Rows:
    """`tokens`, `slots`, `positions`: int64 [n]. Row i feeds `tokens[i]`, whose key and value go to `positions[i]` of
    slot `slots[i]`, and which attends to all positions up to its own. `spans` cut the rows apart, in order."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor
    spans: tuple[Span, ...]

    def to(self, device: torch.device | str) -> "Rows":
        return Rows(self.tokens.to(device), self.slots.to(device), self.positions.to(device), self.spans)

    @classmethod
    def decode(cls, tokens: Tensor, positions: Tensor, slots: slice, longest: int) -> "Rows":
        """One token for each of b neighbouring slots; tokens, positions: [b] int64."""
        index = torch.arange(slots.start, slots.stop, device=tokens.device)
        return cls(tokens, index, positions, (Span(slots, 1, longest),))

    @classmethod
    def prompt(cls, tokens: Tensor, slot: int, start: int = 0) -> "Rows":
        """A prompt [n] int64, or the chunk of one that begins at position `start`."""
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        span = Span(slice(slot, slot + 1), len(tokens), start + len(tokens) - 1, prompt=True)
        return cls(tokens, torch.full_like(positions, slot), positions, (span,))

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """All rows of `parts`, in order. No two parts may have a slot in common."""
        if len(parts) == 1:
            return parts[0]
        names = "tokens", "slots", "positions"
        tokens, slots, positions = (torch.cat([getattr(part, name) for part in parts]) for name in names)
        return cls(tokens, slots, positions, tuple(span for part in parts for span in part.spans))
