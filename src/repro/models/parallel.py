"""Tensor parallelism as in Megatron-LM (Shoeybi et al. 2019): every layer is spread over all ranks.

Of each pair of matrices the first is split by outputs (Q, K and V by heads; gate and up), the second by inputs, so that a block needs two
all-reduces of its hidden states and nothing else. The output head is split by vocabulary and gathered on rank 0, which alone samples.
The embedding is whole on every rank.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from repro.models.linear import GELU, Linear

if TYPE_CHECKING:
    from repro.models.decoder import DecoderConfig

__all__ = ["Shard", "Split"]

Split = Literal["outputs", "inputs", "vocabulary"]


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of the `size` in `group` (None: the default group)."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> "Shard":
        """This process's place in the group."""
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    def check(self, config: "DecoderConfig") -> None:
        """ValueError when heads, KV heads or the feed-forward width cannot be shared evenly."""
        for name, count in (("heads", config.heads), ("kv_heads", config.kv_heads), ("ffn", config.ffn)):
            if count % self.size:
                raise ValueError(f"{name} is {count}, tensor-parallel ranks {self.size}: a multiple is allowed")

    def linear(self, weights: list[Tensor], biases: list[Tensor], split: Split, gelu: GELU | None = None) -> Linear:
        """This rank's part of the layers W [out, in], one below the other, each split alike. Biases [out], or none."""
        if split == "inputs":
            whole = torch.cat(weights)
            mine = whole.chunk(self.size, 1)[self.rank].contiguous()
            return _SummedLinear(mine, torch.cat(biases) if biases and self.rank == 0 else None, self)
        if split == "outputs":
            parts = [
                torch.cat([w.chunk(self.size)[self.rank] for w in part]) if part else None for part in (weights, biases)
            ]
            return Linear(*parts, gelu)
        return _GatheredLinear(torch.cat(weights), torch.cat(biases) if biases else None, self)


class _SummedLinear(Linear):
    """Each rank has some of the inputs; the outputs are summed over ranks. [n, in / size] to [n, out]. One rank adds the bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, shard: Shard) -> None:
        super().__init__(weight, bias)
        self._group = shard.group

    def __call__(self, x: Tensor) -> Tensor:
        out = super().__call__(x).contiguous()
        dist.all_reduce(out, group=self._group)
        return out


class _GatheredLinear(Linear):
    """Each rank has some of the outputs, all of which rank 0 returns: [n, in] to [n, out] there, and to [0, out] elsewhere."""

    def __init__(self, weight: Tensor, bias: Tensor | None, shard: Shard) -> None:
        self._shard, self._outputs = shard, len(weight)
        missing = -len(weight) % shard.size  # gathered pieces have to be equally large
        padded = [
            torch.nn.functional.pad(part, (0, 0, 0, missing) if part.dim() == 2 else (0, missing))
            for part in (weight, bias)
            if part is not None
        ]
        mine = [part.chunk(shard.size)[shard.rank].contiguous() for part in padded]
        super().__init__(mine[0], mine[1] if bias is not None else None)

    def __call__(self, x: Tensor) -> Tensor:
        shard, mine = self._shard, super().__call__(x).contiguous()
        if shard.rank:
            dist.gather(mine, group=shard.group, group_dst=0)
            return mine.new_empty(0, self._outputs)
        pieces = [torch.empty_like(mine) for _ in range(shard.size)]
        dist.gather(mine, pieces, group=shard.group, group_dst=0)
        return torch.cat(pieces, 1)[:, : self._outputs]
