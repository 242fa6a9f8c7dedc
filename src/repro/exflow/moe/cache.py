"""Keys and values of the requests that are being decoded."""

import torch
from torch import Tensor

from repro.models.gpt_moe import GPTMoEConfig


class KeysValues:
    """Keys and values [layers, held requests, positions, kv_heads, width] of the requests in `held`, int64."""

    def __init__(
        self, config: GPTMoEConfig, held: Tensor, requests: int, positions: int, dtype: torch.dtype = torch.float32
    ) -> None:
        heads = config.kv_heads or config.heads
        shape = (config.layers, len(held), positions, heads, config.kv_width // heads)
        self.keys = torch.zeros(shape, dtype=dtype, device=held.device)
        self.values = torch.zeros_like(self.keys)
        self._row = torch.full((requests,), -1, device=held.device)
        self._row[held] = torch.arange(len(held), device=held.device)

    @classmethod
    def shared(
        cls, config: GPTMoEConfig, requests: int, positions: int, dtype: torch.dtype = torch.float32
    ) -> "KeysValues":
        """Of all requests, in memory that processes started from this one see too. CPU only."""
        cache = cls(config, torch.arange(requests), requests, positions, dtype)
        for tensor in (cache.keys, cache.values):
            tensor.share_memory_()
        return cache

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
