"""GPT-NeoX architecture (Black et al. 2022; Pythia): attention and feed-forward have a norm each, and are added at once
or one after the other; a part of each head turns with the position."""

from dataclasses import dataclass

from torch import Tensor

from repro.models.config import Shapes, blocks, linear, norm
from repro.models.decoder import Block
from repro.models.gpt_layers import ACTIVATIONS, GPTDecoder, GPTDecoderConfig
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
        block = norm("attn_norm", width) | norm("ffn_norm", width)
        block |= linear("attn_qkv", 3 * width, width, bias) | linear("attn_output", width, width, bias)
        block |= linear("ffn_up", ffn, width) | linear("ffn_down", width, ffn)
        outside = linear("token_embd", self.vocab, width, bias=False) | norm("output_norm", width)
        return outside | blocks(self.layers, block) | linear("output", self.vocab, width, bias=False)


class GPTNeoX(GPTDecoder):
    """Rotary pairs are interleaved; half-split checkpoints are permuted on load."""

    config: GPTNeoXConfig

    def _block(self, name: str) -> Block:
        return Block(
            attention_norm=self._norm(f"{name}.attn_norm"),
            qkv=self._linear(f"{name}.attn_qkv", split="outputs", parts=3),
            out=self._linear(f"{name}.attn_output", split="inputs"),
            ffn_norm=self._norm(f"{name}.ffn_norm"),
            up=self._linear(f"{name}.ffn_up", split="outputs", gelu=ACTIVATIONS[self.config.activation]),
            down=self._linear(f"{name}.ffn_down", split="inputs"),
        )

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        for layer, block in enumerate(self.blocks):
            attention = block.out(attend(layer, block.qkv(block.attention_norm(x))))
            if self.config.parallel_residual:
                x += attention + block.down(block.up(block.ffn_norm(x)))
            else:
                x += attention
                x += block.down(block.up(block.ffn_norm(x)))
        return self.norm(x)
