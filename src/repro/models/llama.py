"""LLaMA architecture: rotary positions, grouped-query attention, RMS norms, SwiGLU. From a GGUF file, a transformers
folder, or with random weights. Weights that see the same input are fused (Q, K and V; gate and up)."""

from dataclasses import dataclass

from torch import Tensor

from repro.models.config import DecoderConfig, Shapes, blocks
from repro.models.decoder import Decoder
from repro.models.kernels import Attention, Wanted


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a LLaMA model, whose embedding is the output head."""

    kv_heads: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"width {self.width} must be a multiple of heads {self.heads} with an even quotient, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def weight_shapes(self) -> Shapes:
        width, kv = self.width, self.kv_heads * self.head_dim
        block: Shapes = {
            "attn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (kv, width),
            "attn_v": (kv, width),
            "attn_output": (width, width),
            "ffn_norm": (width,),
            "ffn_gate": (self.ffn, width),
            "ffn_up": (self.ffn, width),
            "ffn_down": (width, self.ffn),
        }
        shapes = {"token_embd": (self.vocab, width), "output_norm": (width,)} | blocks(self.layers, block)
        return {f"{name}.weight": shape for name, shape in shapes.items()}


class Llama(Decoder):
    """Without `output.weight` among the weights the embedding is the output head."""

    config: LlamaConfig

    def _norm(self, name: str) -> Tensor:
        return self._get(f"{name}.weight")

    def _hidden(self, x: Tensor, attend: Attention, wanted: Wanted) -> Tensor:
        """The residual stream x is added to in place; each sum comes with the norm that follows it."""
        kernels, eps = self.kernels, self.config.norm_eps
        branch = None
        for layer, block in enumerate(self.blocks):
            normed = kernels.add_norm(x, branch, block.attention_norm, eps)
            branch = block.out(attend(layer, block.qkv(normed)))
            x = self._from_here(layer, x, wanted)
            normed = kernels.add_norm(x, branch, block.ffn_norm, eps)
            branch = block.down(kernels.silu_multiply(block.up(normed)))
        return kernels.add_norm(x, branch, self.norm, eps)
