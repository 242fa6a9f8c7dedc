"""The sizes of a decoder, and the shapes of the weights that follow from them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ABC):
    """`context`: the longest position it was trained for. Of `kv_heads` and `rotary_dim` (the first entries of a head,
    which turn with the position) an architecture has one as a field, the other follows."""

    layers: int
    width: int
    heads: int
    ffn: int
    vocab: int
    context: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    if TYPE_CHECKING:

        @property
        def kv_heads(self) -> int: ...
        @property
        def rotary_dim(self) -> int: ...

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(map(math.prod, self.weight_shapes().values()))

    @abstractmethod
    def weight_shapes(self) -> Shapes:
        """Shapes of all weights by their GGUF names, matrices [out, in]; no output head where it is tied as a rule."""


def affine(name: str, *shape: int, bias: bool = True) -> Shapes:
    """Shapes of the weight and the bias of a linear layer [out, in] or a norm [width]."""
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def blocks(layers: int, block: Shapes) -> Shapes:
    """Shapes of all layers' weights from those of one: `blk.3.attn_norm.weight` for `attn_norm.weight`."""
    return {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
