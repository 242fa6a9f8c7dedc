"""Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019): every layer is spread over all ranks.

Of each pair of matrices the first is split by outputs (Q, K and V by heads; gate and up), the second by inputs, so that
a block needs two all-reduces of its hidden states and nothing else. The output head is split by vocabulary and gathered
on rank 0, which alone samples. The embedding is whole on every rank.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.kernels import GELU, Kernels, Linear

Split = Literal["outputs", "inputs", "vocabulary"]


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of the `size` in the default process group."""

    rank: int
    size: int

    @classmethod
    def of(cls) -> "Shard":
        """This process's place in the group."""
        return cls(dist.get_rank(), dist.get_world_size())

    def check(self, config: DecoderConfig) -> None:
        """ValueError when heads, KV heads or the feed-forward width cannot be shared evenly."""
        for name, count in (("heads", config.heads), ("kv_heads", config.kv_heads), ("ffn", config.ffn)):
            if count % self.size:
                raise ValueError(f"{name} is {count}, tensor-parallel ranks {self.size}: a multiple is allowed")

    def linear(
        self, kernels: Kernels, weights: list[Tensor], biases: list[Tensor], split: Split, gelu: GELU | None = None
    ) -> Linear:
        """This rank's part of the layers W [out, in], one below the other, each split alike. Biases [out], or none."""
        if split == "outputs":
            weights, biases = ([w.chunk(self.size)[self.rank] for w in part] for part in (weights, biases))
            return kernels.linear(torch.cat(weights), torch.cat(biases) if biases else None, gelu)
        weight, bias = torch.cat(weights), torch.cat(biases) if biases else None
        if split == "inputs":
            mine = weight.chunk(self.size, 1)[self.rank].contiguous()
            return partial(self._summed, kernels.linear(mine, None if self.rank else bias))  # one adds the bias
        missing = -len(weight) % self.size  # gathered parts have to be equally large
        mine = F.pad(weight, (0, 0, 0, missing)).chunk(self.size)[self.rank].contiguous()
        if bias is not None:
            bias = F.pad(bias, (0, missing)).chunk(self.size)[self.rank].contiguous()
        return partial(self._gathered, kernels.linear(mine, bias), len(weight))

    def _summed(self, part: Linear, x: Tensor) -> Tensor:
        """Each rank has some of the inputs; outputs are summed over ranks: [n, in / size] to [n, out]."""
        out = part(x).contiguous()
        if len(out):  # of the last layer perhaps no row is wanted
            dist.all_reduce(out)
        return out

    def _gathered(self, part: Linear, outputs: int, x: Tensor) -> Tensor:
        """Each rank has some of the outputs; rank 0 returns all. [n, in] to [n, out] there, to [0, out] elsewhere."""
        mine = part(x).contiguous()
        pieces = None if self.rank else [torch.empty_like(mine) for _ in range(self.size)]
        dist.gather(mine, pieces, dst=0)
        return mine.new_empty(0, outputs) if pieces is None else torch.cat(pieces, 1)[:, :outputs]
