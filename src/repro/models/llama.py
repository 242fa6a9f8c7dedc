"""LLaMA architecture: rotary positions, grouped-query attention, RMS norms, SwiGLU. From a GGUF file, a transformers
folder, or with random weights. Weights that see the same input are fused (Q, K and V; gate and up)."""

import math
from dataclasses import dataclass

from torch import Tensor

from repro.models.decoder import Decoder
from repro.models.kernels import Attention, Linear


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a LLaMA model; `context` is the longest position it was trained for."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    context: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"width {self.width} must be a multiple of heads {self.heads} with an even quotient, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    @property
    def parameters(self) -> int:
        """Number of weights, with embeddings tied to the output head."""
        return sum(map(math.prod, weight_shapes(self).values()))


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by their GGUF names, matrices [out, in]; without the output head, which is tied."""
    width, kv = config.width, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (config.vocab, width)}
    for i in range(config.layers):
        for name, rows in (("q", width), ("k", kv), ("v", kv), ("output", width)):
            shapes[f"blk.{i}.attn_{name}"] = (rows, width)
        shapes |= {f"blk.{i}.ffn_{name}": (config.ffn, width) for name in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down"] = (width, config.ffn)
    norms = [f"blk.{i}.{kind}_norm" for i in range(config.layers) for kind in ("attn", "ffn")]
    shapes |= dict.fromkeys([*norms, "output_norm"], (width,))
    return {f"{name}.weight": shape for name, shape in shapes.items()}


@dataclass(frozen=True)
class _Block:
    attention_norm: Tensor
    qkv: Linear
    out: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama(Decoder):
    """Without `output.weight` among the weights the embedding is the output head."""

    config: LlamaConfig
    weight_shapes = staticmethod(weight_shapes)

    def _build(self) -> None:
        self.norm = self._get("output_norm.weight")
        self.head = self._output()
        self.blocks = [self._block(f"blk.{i}") for i in range(self.config.layers)]

    def _block(self, name: str) -> _Block:
        return _Block(
            attention_norm=self._get(f"{name}.attn_norm.weight"),
            qkv=self._linear(f"{name}.attn_q", f"{name}.attn_k", f"{name}.attn_v", split="outputs"),
            out=self._linear(f"{name}.attn_output", split="inputs"),
            ffn_norm=self._get(f"{name}.ffn_norm.weight"),
            gate_up=self._linear(f"{name}.ffn_gate", f"{name}.ffn_up", split="outputs"),
            down=self._linear(f"{name}.ffn_down", split="inputs"),
        )

    def _hidden(self, x: Tensor, attend: Attention) -> Tensor:
        """The residual stream x is added to in place; each sum comes with the norm that follows it."""
        kernels, eps = self.kernels, self.config.norm_eps
        branch = None
        for layer, block in enumerate(self.blocks):
            normed = kernels.add_norm(x, branch, block.attention_norm, eps)
            branch = block.out(attend(layer, block.qkv(normed)))
            normed = kernels.add_norm(x, branch, block.ffn_norm, eps)
            branch = block.down(kernels.silu_multiply(block.gate_up(normed)))
        return kernels.add_norm(x, branch, self.norm, eps)
