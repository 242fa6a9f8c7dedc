"""GPT-J architecture (Wang & Komatsuzaki 2021): attention and feed-forward see the same normed input and are added at
once; a part of each head turns with the position."""

from dataclasses import dataclass

from torch import Tensor

from repro.models.config import Shapes, affine, blocks
from repro.models.gpt_layers import GPTDecoder, GPTDecoderConfig
from repro.models.kernels import Attention


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
    """Rotary pairs are interleaved."""

    config: GPTJConfig

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        for layer, block in enumerate(self.blocks):
            normed = block.attention_norm(x)
            x += block.out(attend(layer, block.qkv(normed))) + block.down(block.up(normed))
        return self.norm(x)
