"""What GPT-J and GPT-NeoX have in common: partial rotary positions, LayerNorm with a bias, feed-forward with GELU."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from repro.models.decoder import Decoder
from repro.models.kernels import GELU, Linear

# Names that transformers gives. Those by a hyperbolic tangent differ in the order of their roundings only.
ACTIVATIONS: dict[str, GELU] = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_accurate": "tanh",
    "gelu_fast": "tanh",
    "gelu_new": "tanh",
    "gelu_python_tanh": "tanh",
    "gelu_pytorch_tanh": "tanh",
}


@dataclass(frozen=True)
class PartialRotaryConfig:
    """Sizes. The first `rotary_dim` entries of each head turn with the position; `context`: the longest position it was
    trained for; `activation`: one of `ACTIVATIONS`. ValueError for sizes that do not fit together."""

    layers: int
    width: int
    heads: int
    rotary_dim: int
    ffn: int
    vocab: int
    context: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    activation: str = "gelu"

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim is {self.rotary_dim}, allowed: even, 2 to {self.head_dim} (width / heads)")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}, allowed: {', '.join(map(repr, ACTIVATIONS))}")

    @property
    def kv_heads(self) -> int:
        """Every head has keys and values of its own."""
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class LayerNorm:
    """(x - mean) / √(variance + eps) · weight + bias over the last dimension; weight, bias: [width]."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class FeedForward:
    """down(GELU(up(x))): [n, width] to [n, width]. GELU is part of the product `up`."""

    up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class GPTDecoder(Decoder):
    """Builds these from weights by their GGUF names."""

    config: PartialRotaryConfig

    def _layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(self._get(f"{name}.weight"), self._get(f"{name}.bias"), self.config.norm_eps)

    def _feed_forward(self, layer: int) -> FeedForward:
        up = self._linear(f"blk.{layer}.ffn_up", split="outputs", gelu=ACTIVATIONS[self.config.activation])
        return FeedForward(up, self._linear(f"blk.{layer}.ffn_down", split="inputs"))


Shapes = dict[str, tuple[int, ...]]


def linear(name: str, out: int, width: int, bias: bool = True) -> Shapes:
    """Shapes of a linear layer's weights."""
    return {f"{name}.weight": (out, width)} | ({f"{name}.bias": (out,)} if bias else {})


def norm(name: str, width: int) -> Shapes:
    """Shapes of a LayerNorm's weights."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def blocks(layers: int, block: Shapes) -> Shapes:
    """Shapes of all layers' weights from those of one: `blk.3.attn_norm.weight` for `attn_norm.weight`."""
    return {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in block.items()}
