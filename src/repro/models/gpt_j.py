"""GPT-J architecture (Wang & Komatsuzaki 2021): attention and feed-forward see the same normed input and are added at
once; a part of each head turns with the position."""

import math
from dataclasses import dataclass

from torch import Tensor

from repro.models.gpt_layers import FeedForward, GPTDecoder, LayerNorm, PartialRotaryConfig, blocks, linear, norm
from repro.models.kernels import Attention, Linear


@dataclass(frozen=True)
class GPTJConfig(PartialRotaryConfig):
    """Sizes of a GPT-J model."""

    activation: str = "gelu_new"

    @property
    def parameters(self) -> int:
        """Number of weights, with an output head of its own."""
        return sum(map(math.prod, weight_shapes(self).values()))


GPT_J_6B = GPTJConfig(layers=28, width=4096, heads=16, rotary_dim=64, ffn=16384, vocab=50400)
"""The sizes of EleutherAI/gpt-j-6b."""


def weight_shapes(config: GPTJConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by their GGUF names, matrices [out, in]."""
    width, ffn = config.width, config.ffn
    block = norm("attn_norm", width) | linear("ffn_up", ffn, width) | linear("ffn_down", width, ffn)
    for name in ("q", "k", "v", "output"):
        block |= linear(f"attn_{name}", width, width, bias=False)
    outside = linear("token_embd", config.vocab, width, bias=False) | norm("output_norm", width)
    return outside | blocks(config.layers, block) | linear("output", config.vocab, width)


@dataclass(frozen=True)
class _Block:
    norm: LayerNorm
    qkv: Linear
    out: Linear
    feed_forward: FeedForward


class GPTJ(GPTDecoder):
    """Rotary pairs are interleaved. Without `output.weight` the embedding is the output head, which keeps its bias."""

    config: GPTJConfig
    weight_shapes = staticmethod(weight_shapes)

    def _build(self) -> None:
        self.norm, self.head = self._layer_norm("output_norm"), self._output()
        self.blocks = [
            _Block(
                norm=self._layer_norm(f"blk.{i}.attn_norm"),
                qkv=self._linear(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v", split="outputs"),
                out=self._linear(f"blk.{i}.attn_output", split="inputs"),
                feed_forward=self._feed_forward(i),
            )
            for i in range(self.config.layers)
        ]

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        for layer, block in enumerate(self.blocks):
            normed = block.norm(x)
            x += block.out(attend(layer, block.qkv(normed))) + block.feed_forward(normed)
        return self.norm(x)
