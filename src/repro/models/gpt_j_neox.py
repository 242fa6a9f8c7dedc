"""GPT-J (Wang & Komatsuzaki 2021) and GPT-NeoX (Black et al. 2022; Pythia), and what they have in common: a part of each
head turns with the position, LayerNorm has a bias, feed-forward layers have GELU."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from repro.models.config import DecoderConfig, Shapes, affine, blocks
from repro.models.decoder import Decoder
from repro.models.kernels import GELU, Attention, Wanted

# Names that transformers gives. Those by a hyperbolic tangent differ in the order of their roundings only.
_BY_TANH = "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"
ACTIVATIONS: dict[str, GELU] = {"gelu": "none", "gelu_python": "none"} | dict.fromkeys(_BY_TANH, "tanh")


@dataclass(frozen=True, kw_only=True)
class GPTDecoderConfig(DecoderConfig):
    """`activation`: one of `ACTIVATIONS`. ValueError for sizes that do not fit together."""

    rotary_dim: int
    activation: str = "gelu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim:
            raise ValueError(f"rotary_dim is {self.rotary_dim}, allowed: even, 2 to {self.head_dim} (width / heads)")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation is {self.activation!r}, allowed: {', '.join(map(repr, ACTIVATIONS))}")
        self._check_turns()

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


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(GPTDecoderConfig):
    """Sizes of a GPT-J model, which has an output head of its own."""

    activation: str = "gelu_new"

    def weight_shapes(self) -> Shapes:
        width, ffn = self.width, self.ffn
        block = affine("attn_norm", width) | affine("ffn_up", ffn, width) | affine("ffn_down", width, ffn)
        for name in ("q", "k", "v", "output"):
            block |= affine(f"attn_{name}", width, width, bias=False)
        outside = affine("token_embd", self.vocab, width, bias=False) | affine("output_norm", width)
        return outside | blocks(self.layers, block) | affine("output", self.vocab, width)


GPT_J_6B = GPTJConfig(layers=28, width=4096, heads=16, rotary_dim=64, ffn=16384, vocab=50400)
"""The sizes of EleutherAI/gpt-j-6b."""


class GPTJ(GPTDecoder):
    """Attention and feed-forward see the same normed input and are added at once. Rotary pairs are interleaved."""

    config: GPTJConfig

    def _hidden(self, x: Tensor, attend: Attention, wanted: Wanted) -> Tensor:
        for layer, block in enumerate(self.blocks):
            normed = block.attention_norm(x)
            attention = block.out(attend(layer, block.qkv(normed)))
            x, normed = (self._from_here(layer, part, wanted) for part in (x, normed))
            x += attention + block.down(block.up(normed))
        return self.norm(x)


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(GPTDecoderConfig):
    """Sizes of a GPT-NeoX model, which has an output head of its own. `parallel_residual`: the feed-forward layer sees
    the block's input, not what attention made of it; `attention_bias`: of the products around attention."""

    parallel_residual: bool = True
    attention_bias: bool = True

    def weight_shapes(self) -> Shapes:
        """`attn_qkv`: the queries of all heads, then keys, then values."""
        width, ffn, bias = self.width, self.ffn, self.attention_bias
        block = affine("attn_norm", width) | affine("ffn_norm", width)
        block |= affine("attn_qkv", 3 * width, width, bias=bias) | affine("attn_output", width, width, bias=bias)
        block |= affine("ffn_up", ffn, width) | affine("ffn_down", width, ffn)
        outside = affine("token_embd", self.vocab, width, bias=False) | affine("output_norm", width)
        return outside | blocks(self.layers, block) | affine("output", self.vocab, width, bias=False)


class GPTNeoX(GPTDecoder):
    """Attention and feed-forward have a norm each, and are added at once or one after the other. Rotary pairs are
    interleaved; half-split checkpoints are permuted on load."""

    config: GPTNeoXConfig

    def _hidden(self, x: Tensor, attend: Attention, wanted: Wanted) -> Tensor:
        for layer, block in enumerate(self.blocks):
            attention = block.out(attend(layer, block.qkv(block.attention_norm(x))))
            x = self._from_here(layer, x, wanted)
            if self.config.parallel_residual:
                x += attention + block.down(block.up(block.ffn_norm(x)))
            else:
                x += attention
                x += block.down(block.up(block.ffn_norm(x)))
        return self.norm(x)
