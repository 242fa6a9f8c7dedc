"""GPT-NeoX architecture (Black et al. 2022; Pythia): attention and feed-forward have a norm each, and are added at once
or one after the other; a part of each head turns with the position."""

import math
from dataclasses import dataclass

from torch import Tensor

from repro.models.gpt_layers import FeedForward, GPTDecoder, LayerNorm, PartialRotaryConfig, blocks, linear, norm
from repro.models.kernels import Attention, Linear


@dataclass(frozen=True)
class GPTNeoXConfig(PartialRotaryConfig):
    """Sizes of a GPT-NeoX model. `parallel_residual`: the feed-forward layer sees the block's input, not what attention
    made of it; `attention_bias`: whether the products around attention have biases."""

    parallel_residual: bool = True
    attention_bias: bool = True

    @property
    def parameters(self) -> int:
        """Number of weights, with an output head of its own."""
        return sum(map(math.prod, weight_shapes(self).values()))


def weight_shapes(config: GPTNeoXConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by their GGUF names, [out, in]. `attn_qkv`: the queries of all heads, then keys, then
    values."""
    width, ffn, bias = config.width, config.ffn, config.attention_bias
    block = norm("attn_norm", width) | norm("ffn_norm", width)
    block |= linear("attn_qkv", 3 * width, width, bias) | linear("attn_output", width, width, bias)
    block |= linear("ffn_up", ffn, width) | linear("ffn_down", width, ffn)
    outside = linear("token_embd", config.vocab, width, bias=False) | norm("output_norm", width)
    return outside | blocks(config.layers, block) | linear("output", config.vocab, width, bias=False)


@dataclass(frozen=True)
class _Block:
    attention_norm: LayerNorm
    qkv: Linear
    out: Linear
    ffn_norm: LayerNorm
    feed_forward: FeedForward


class GPTNeoX(GPTDecoder):
    """Rotary pairs are interleaved; half-split checkpoints are permuted on load. Without `output.weight` among the
    weights the embedding is the output head."""

    config: GPTNeoXConfig
    weight_shapes = staticmethod(weight_shapes)

    def _build(self) -> None:
        self.norm, self.head = self._layer_norm("output_norm"), self._output()
        self.blocks = [
            _Block(
                attention_norm=self._layer_norm(f"blk.{i}.attn_norm"),
                qkv=self._linear(f"blk.{i}.attn_qkv", split="outputs", parts=3),
                out=self._linear(f"blk.{i}.attn_output", split="inputs"),
                ffn_norm=self._layer_norm(f"blk.{i}.ffn_norm"),
                feed_forward=self._feed_forward(i),
            )
            for i in range(self.config.layers)
        ]

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        for layer, block in enumerate(self.blocks):
            attention = block.out(attend(layer, block.qkv(block.attention_norm(x))))
            if self.config.parallel_residual:
                x += attention + block.feed_forward(block.ffn_norm(x))
            else:
                x += attention
                x += block.feed_forward(block.ffn_norm(x))
        return self.norm(x)
