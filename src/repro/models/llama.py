"""LLaMA architecture: rotary positions, grouped-query attention, RMS norms, SwiGLU. Mistral is the same, Qwen2 and Qwen3
with an option each. From a GGUF file, a transformers folder, or with random weights. Weights that see the same input are
fused (Q, K and V; gate and up)."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from repro.models.config import DecoderConfig, Shapes, affine, blocks
from repro.models.decoder import Block, Decoder
from repro.models.kernels import Attention, Wanted


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a LLaMA model. The embedding is the output head, unless the weights hold one. `head_dim`: width / heads
    if it is None. `qkv_bias`: queries, keys and values have biases (Qwen2); `head_norms`: each query and key head is
    normed before it turns, with weights that all heads share (Qwen3). ValueError for sizes that are out of range or do
    not fit together: an odd `head_dim`, `heads` that are no multiple of `kv_heads`."""

    kv_heads: int
    head_dim: int | None = None  # type: ignore[assignment]
    qkv_bias: bool = False
    head_norms: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, uneven = f"head_dim {self.head_dim} must be even", False
        if self.head_dim is None:
            rule = f"width {self.width} must be a multiple of heads {self.heads} with an even quotient"
            uneven = bool(self.width % self.heads)
            object.__setattr__(self, "head_dim", self.width // self.heads)
        if uneven or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(f"{rule}, and heads a multiple of kv_heads {self.kv_heads}")
        self._check_turns()

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def weight_shapes(self) -> Shapes:
        width, q, kv = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim
        block: Shapes = {"attn_norm.weight": (width,)}
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            block |= affine(f"attn_{name}", rows, width, bias=self.qkv_bias)
            if self.head_norms and name != "v":
                block |= {f"attn_{name}_norm.weight": (self.head_dim,)}
        block |= {
            "attn_output.weight": (width, q),
            "ffn_norm.weight": (width,),
            "ffn_gate.weight": (self.ffn, width),
            "ffn_up.weight": (self.ffn, width),
            "ffn_down.weight": (width, self.ffn),
        }
        return {"token_embd.weight": (self.vocab, width), "output_norm.weight": (width,)} | blocks(self.layers, block)


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
            branch = block.out(attend(layer, self._headwise(block, block.qkv(normed))))
            x = self._from_here(layer, x, wanted)
            normed = kernels.add_norm(x, branch, block.ffn_norm, eps)
            branch = block.down(block.up(normed))
        return kernels.add_norm(x, branch, self.norm, eps)

    def _block(self, name: str) -> Block:
        block = super()._block(name)
        return replace(block, up=self.kernels.gated(block.up))

    def _headwise(self, block: Block, qkv: Tensor) -> Tensor:
        """Queries, keys and values [n, (heads + 2 kv_heads) · head_dim] of this rank; the heads of the first two normed
        where the model does that."""
        if not block.head_norms:
            return qkv
        dim, ranks = self.config.head_dim, self.shard.size if self.shard is not None else 1
        q, kv = (heads * dim // ranks for heads in (self.config.heads, self.config.kv_heads))
        *parts, values = qkv.split([q, kv, kv], 1)
        normed = [
            self.kernels.add_norm(part.contiguous().view(-1, dim), None, weight, self.config.norm_eps).view(part.shape)
            for part, weight in zip(parts, block.head_norms, strict=True)
        ]
        return torch.cat([*normed, values], 1)
