"""LLaMA architecture with rotary positions and grouped-query attention, from a GGUF file or with random weights.

The model owns no KV cache: `prefill` and `decode` write into one that the caller lays out (`kv_cache.py`), so that a serving
engine decides which slot a request lives in. Weights that see the same input are fused (Q, K and V; gate and up).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.models.kv_cache import KVCache, SlotCache

__all__ = ["Llama", "LlamaConfig", "rotate", "weight_shapes"]

_SPAN_BLOCK = 64  # decode attends over whole blocks of this many positions; the rest of a slot is not read


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
    def parameters(self) -> int:
        """Number of weights, with embeddings tied to the output head."""
        qkv = self.width * (self.heads + 2 * self.kv_heads) * self.head_dim
        block = qkv + self.width * self.width + 3 * self.width * self.ffn + 2 * self.width
        return self.layers * block + self.vocab * self.width + self.width


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights by their GGUF names, matrices [out, in]; the output head is tied to the embedding and not among them."""
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


class _Linear:
    """y = x Wᵀ for x [rows, in] and W [out, in], without bias.

    On a CPU the weight is packed once into oneDNN's blocked layout (half the time of `F.linear` in fp32 on the machines
    measured). A single row would take a matrix-vector kernel that sums in another order than the matrix kernel, and a
    lone request would round differently from a fused one; so one row is computed as two.
    """

    def __init__(self, weight: Tensor, packed: bool) -> None:
        self.packed = packed
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, 32) if packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight)
        rows = x if x.shape[0] > 1 else x.expand(2, -1)
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, None, "none", [], "")[: x.shape[0]]


@dataclass(frozen=True)
class _Block:
    attention_norm: Tensor
    qkv: _Linear
    out: _Linear
    ffn_norm: Tensor
    gate_up: _Linear
    down: _Linear


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs (2i, 2i+1), GGUF's LLaMA convention, computed in fp32.

    x: [rows, heads, head_dim]; cos, sin: [rows, 1, head_dim/2] fp32. Returns x's shape and dtype.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class Llama:
    """Inference only. `packed` says whether linear weights are in oneDNN's layout (CPU) or plain (any other device)."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """`weights`: tensors by their GGUF names, [out, in] (`checkpoint.read_gguf` gives both). Without `output.weight` the
        embedding is the output head."""
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.packed = self.device.type == "cpu" and torch.backends.mkldnn.is_available()

        def get(*names: str) -> Tensor:
            return torch.cat([weights[f"{name}.weight"] for name in names]).to(self.device, dtype)

        def linear(*names: str) -> _Linear:
            return _Linear(get(*names), self.packed)

        self.embedding = get("token_embd")
        self.norm = get("output_norm")
        self.head = linear("output" if "output.weight" in weights else "token_embd")
        self.blocks = [
            _Block(
                attention_norm=get(f"blk.{i}.attn_norm"),
                qkv=linear(f"blk.{i}.attn_q", f"blk.{i}.attn_k", f"blk.{i}.attn_v"),
                out=linear(f"blk.{i}.attn_output"),
                ffn_norm=get(f"blk.{i}.ffn_norm"),
                gate_up=linear(f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up"),
                down=linear(f"blk.{i}.ffn_down"),
            )
            for i in range(config.layers)
        ]
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = (config.rope_base**-half).to(self.device)

    @classmethod
    def random(cls, config: LlamaConfig, seed: int = 0, **options: Any) -> "Llama":
        """Gaussian weights of standard deviation 1/√in: for tests and for benchmarks of any size."""
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: torch.randn(shape, generator=generator) / math.sqrt(shape[1]) if len(shape) > 1 else torch.ones(shape)
            for name, shape in weight_shapes(config).items()
        }
        return cls(config, weights, **options)

    def new_cache(self, slots: int, capacity: int) -> SlotCache:
        """An empty cache of the model's sizes, dtype and device."""
        return SlotCache(self.config, slots, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, cache: KVCache, slot: int = 0, start: int = 0) -> Tensor:
        """Run a prompt, or the piece of one that begins at position `start` when all before it is in the slot already.

        tokens: [n] int64; their keys and values go to positions start … start+n-1 of `slot`. Returns logits [vocab] after the
        last token.
        """
        n = len(tokens)
        positions = torch.arange(start, start + n, device=self.device)
        slots = torch.full_like(positions, slot)
        # Every token attends to all before it, and the first n-1 of a piece to fewer of its own.
        seen = positions[:, None] >= torch.arange(start + n, device=self.device) if start else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, slots, positions, k, v)
            if start:
                keys, values = cache.read(layer, slice(slot, slot + 1), start + n)
            else:
                keys, values = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            options = {"attn_mask": seen, "is_causal": seen is None, "enable_gqa": True}
            return F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, **options)[0].transpose(0, 1)

        hidden = self._forward(tokens, positions, attend)
        return self.head(hidden[-1:])[0]

    @torch.inference_mode()
    def decode(self, tokens: Tensor, lengths: Tensor, cache: KVCache, slots: slice, longest: int) -> Tensor:
        """One token for each of b requests at once: the fused iteration. No Python per request.

        tokens: [b] int64, the last token of each request; lengths: [b] int64, tokens already in its slot, which is where
        this one's key and value go; slots: the b slots of `cache`; longest: at least the largest of `lengths` (the caller knows it, so
        that the device need not be asked). Returns logits [b, vocab].
        """
        kv_heads, scale = self.config.kv_heads, self.config.head_dim**-0.5
        rows = torch.arange(slots.start, slots.stop, device=self.device)
        span = min(cache.capacity, _SPAN_BLOCK * (longest // _SPAN_BLOCK + 1))
        beyond = torch.arange(span, device=self.device) > lengths[:, None]
        mask = torch.zeros(beyond.shape, dtype=self.dtype, device=self.device).masked_fill_(beyond, -math.inf)
        mask = mask[:, None, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.write(layer, rows, lengths, k, v)
            keys, values = cache.read(layer, slots, span)
            # The heads that share a KV head stand where the query positions would: no copy of the cache per head.
            # Written out because torch's fused CPU kernel rounds by the thread a row falls to, so by the batch around it.
            scores = (q * scale).unflatten(1, (kv_heads, -1)) @ keys.mT
            return (scores + mask).softmax(-1) @ values

        return self.head(self._forward(tokens, lengths, attend))

    def _forward(
        self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Final hidden states [rows, width]; `attend(layer, q, k, v)` stores k and v and returns the attention output."""
        config, dim = self.config, self.config.head_dim
        angles = positions[:, None, None] * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        heads = [config.heads, config.kv_heads, config.kv_heads]
        x = self.embedding[tokens]
        for layer, block in enumerate(self.blocks):
            qkv = block.qkv(self._normed(x, block.attention_norm)).view(len(tokens), -1, dim)
            q, k = rotate(qkv[:, : -config.kv_heads], cos, sin).split(heads[:2], 1)
            x = x + block.out(attend(layer, q, k, qkv[:, -config.kv_heads :]).reshape(len(tokens), -1))
            gate, up = block.gate_up(self._normed(x, block.ffn_norm)).chunk(2, -1)
            x = x + block.down(F.silu(gate) * up)
        return self._normed(x, self.norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.width,), weight, self.config.norm_eps)
