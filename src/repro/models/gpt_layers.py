"""What GPT-J and GPT-NeoX have in common: partial rotary positions, LayerNorm with a bias, feed-forward with GELU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from repro.models.config import DecoderConfig
from repro.models.decoder import Decoder
from repro.models.kernels import GELU

# Names that transformers gives. Those by a hyperbolic tangent differ in the order of their roundings only.
_BY_TANH = "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"
ACTIVATIONS: dict[str, GELU] = {"gelu": "none", "gelu_python": "none"} | dict.fromkeys(_BY_TANH, "tanh")


@dataclass(frozen=True, kw_only=True)
class GPTDecoderConfig(DecoderConfig):
    """`activation`: one of `ACTIVATIONS`. ValueError for sizes that do not fit together."""

    rotary_dim: int
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


class GPTDecoder(Decoder):
    """Without `output.weight` among the weights the embedding is the output head, which keeps a bias that it has."""

    config: GPTDecoderConfig

    @property
    def _gelu(self) -> GELU:
        return ACTIVATIONS[self.config.activation]

    def _norm(self, name: str) -> Callable[[Tensor], Tensor]:
        """(x - mean) / √(variance + eps) · weight + bias over the last dimension."""
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        return partial(F.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias, eps=self.config.norm_eps)
