"""GPT-NeoX architecture (Black et al. 2022; Pythia): attention and feed-forward have a norm each, and are added at once
or one after the other; a part of each head turns with the position."""

from dataclasses import dataclass

from torch import Tensor

from repro.models.config import Shapes, affine, blocks
from repro.models.gpt_layers import GPTDecoder, GPTDecoderConfig
from repro.models.kernels import Attention


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
    """Rotary pairs are interleaved; half-split checkpoints are permuted on load."""

    config: GPTNeoXConfig

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        for layer, block in enumerate(self.blocks):
            attention = block.out(attend(layer, block.qkv(block.attention_norm(x))))
            if self.config.parallel_residual:
                x += attention + block.down(block.up(block.ffn_norm(x)))
            else:
                x += attention
                x += block.down(block.up(block.ffn_norm(x)))
        return self.norm(x)
