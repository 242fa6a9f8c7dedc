"""GPT-J architecture (Wang & Komatsuzaki 2021): attention and feed-forward see the same normed input and are added at
once; a part of each head turns with the position."""

from dataclasses import dataclass

from torch import Tensor

from repro.models.config import Shapes, blocks, linear, norm
from repro.models.decoder import Block
from repro.models.gpt_layers import ACTIVATIONS, GPTDecoder, GPTDecoderConfig
from repro.models.kernels import Attention


@dataclass(frozen=True, kw_only=True)
class GPTJConfig(GPTDecoderConfig):
    """Sizes of a GPT-J model, which has an output head of its own."""

    activation: str = "gelu_new"

    def weight_shapes(self) -> Shapes:
        width, ffn = self.width, self.ffn
        block = norm("attn_norm", width) | linear("ffn_up", ffn, width) | linear("ffn_down", width, ffn)
        for name in ("q", "k", "v", "output"):
            block |= linear(f"attn_{name}", width, width, bias=False)
        outside = linear("token_embd", self.vocab, width, bias=False) | norm("output_norm", width)
        return outside | blocks(self.layers, block) | linear("output", self.vocab, width)


GPT_J_6B = GPTJConfig(layers=28, width=4096, heads=16, rotary_dim=64, ffn=16384, vocab=50400)
"""The sizes of EleutherAI/gpt-j-6b."""


class GPTJ(GPTDecoder):
    """Rotary pairs are interleaved."""

    config: GPTJConfig

    def _block(self, name: str) -> Block:
        shared = self._norm(f"{name}.attn_norm")
        return Block(
            attention_norm=shared,
            qkv=self._linear(f"{name}.attn_q", f"{name}.attn_k", f"{name}.attn_v", split="outputs"),
            out=self._linear(f"{name}.attn_output", split="inputs"),
            ffn_norm=shared,
            up=self._linear(f"{name}.ffn_up", split="outputs", gelu=ACTIVATIONS[self.config.activation]),
            down=self._linear(f"{name}.ffn_down", split="inputs"),
        )

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        for layer, block in enumerate(self.blocks):
            normed = block.attention_norm(x)
            x += block.out(attend(layer, block.qkv(normed))) + block.down(block.up(normed))
        return self.norm(x)
