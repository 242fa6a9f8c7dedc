"""Keys and values of the requests that are being decoded."""

import torch
from torch import Tensor, nn

from repro.models.gpt_moe import GPTMoEConfig


class KeysValues(nn.Module):
    """Keys and values [layers, held requests, positions, kv_heads, width] of the requests in `held`, bool [requests].
    After `share_memory` (CPU only) processes that are started from this one see them too."""

    def __init__(self, config: GPTMoEConfig, held: Tensor, positions: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        heads = config.kv_heads or config.heads
        shape = (config.layers, int(held.sum()), positions, heads, config.kv_width // heads)
        self.keys = nn.Buffer(torch.zeros(shape, dtype=dtype, device=held.device))
        self.values = nn.Buffer(torch.zeros_like(self.keys))
        self._row = nn.Buffer(held.cumsum(dim=0) - 1)

    @property
    def room(self) -> tuple[int, int]:
        """Requests that it was made for, and positions of each."""
        return len(self._row), self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int | Tensor, request: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values [n, kv_heads, width] of `request` [n] at `position` [n]; `layer`: one, or one a row."""
        row = self._row[request]
        self.keys[layer, row, position], self.values[layer, row, position] = keys, values

    def read(self, layer: int, request: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values [n, positions, kv_heads, width] of `request` [n], and their mask [n, 1, 1, positions]: up to
        `position` [n]."""
        row, known = self._row[request], int(position.max()) + 1 if len(position) else 0
        mask = torch.arange(known, device=position.device) <= position[:, None]
        return self.keys[layer, row, :known], self.values[layer, row, :known], mask[:, None, None]
