"""The steps in torch, on any device: linear layers in the layout that is fastest to multiply with, and attention span by
span, over whole blocks of positions."""

import math
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.models.kv_cache import KVCache
from repro.models.rows import Rows, Span
from repro.models.wide_linear import multiplies_bfloat16

_ROWS = 32  # oneDNN asks how many rows to expect when it lays weights out
_SPAN_BLOCK = 64  # positions: spans of one token each attend over whole blocks; the rest of a slot is not read

GELU = Literal["none", "tanh"]
"""How GELU is computed, as torch calls it: exactly, or by a hyperbolic tangent."""

Linear = Callable[[Tensor], Tensor]
"""y = x Wᵀ + b for x [n, in], W [out, in] and b [out] or None; or its GELU."""

Attention = Callable[[int, Tensor], Tensor]
"""attend(layer, qkv): rotates queries and keys, stores keys and values, attends: causal, with grouped queries. qkv [n,
(heads + 2 kv_heads) · head_dim] to [n, heads · head_dim]; in the last layer of the rows that are wanted, [m, …]."""

Wanted = Tensor | slice
"""Which rows of a pass: a slice, or int64 [m]."""

Attend = Callable[[int, Tensor], Tensor]
"""The last part of it, of one span: attend(layer, queries [n, heads, head_dim]), over what the cache holds by then."""


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of neighbouring pairs (2i, 2i+1), GGUF's LLaMA convention, computed in fp32.

    x: [n, heads, head_dim]; cosine, sine: fp32 [n, pairs], pairs ≤ head_dim/2; the rest of a head stays. Returns as x.
    """
    turned, rest = x.split([2 * cosine.shape[1], x.shape[-1] - 2 * cosine.shape[1]], -1)
    even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[:, None], sine[:, None]
    turned = torch.stack((even * cosine - odd * sine, odd * cosine + even * sine), -1).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)


class PlainLinear:
    """As torch has it, on any device. `layout`, of all classes of linear layers, goes into records."""

    layout = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> None:
        self.weight, self.bias, self.gelu = weight, bias, gelu

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.gelu is None else F.gelu(y, approximate=self.gelu)


class OneDNNLinear:
    """The weight is packed once into oneDNN's blocked layout (half the time of `F.linear` on the machines measured).

    A single row would take a matrix-vector kernel that sums in another order than the matrix kernel, and a lone request
    would round differently from a fused one; so one row is computed as two. GELU is part of the product for the same
    reason: `F.gelu` takes another formula at the end of a thread's share, so a row's bits would depend on its place. (In
    bf16 on a processor with AMX they depend on the number of rows all the same; kernels in C++ have their own products.)
    """

    layout = "oneDNN packed"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), bias
        self._outputs = len(weight)
        self._after: tuple[str, list[float], str] = ("none", [], "") if gelu is None else ("gelu", [], gelu)

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self._outputs)
        rows = x if x.shape[0] > 1 else x.expand(2, -1)
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, *self._after)[: x.shape[0]]


def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs such weights on this processor: those in bfloat16 on x86 with AVX-512, or AVX_NE_CONVERT."""
    if dtype is torch.float32:
        return torch.backends.mkldnn.is_available()
    return dtype is torch.bfloat16 and multiplies_bfloat16()


class Kernels:
    """In torch, and what the other kernels do alike. `name` goes into records. `capturable`: whether a pass over rows
    that decode is the same launches wherever they lie, as a CUDA graph needs it."""

    name = "torch"
    capturable = False

    def linear(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> Linear:
        """The layer with this weight [out, in] and bias [out]; in oneDNN's layout on a CPU that has it."""
        packed = weight.device.type == "cpu" and _packs(weight.dtype)
        return (OneDNNLinear if packed else PlainLinear)(weight, bias, gelu)

    def take(self, table: Tensor, index: Tensor) -> Tensor:
        """table[index], [n, width], of table [m, width] and index [n] int64, which is refused below 0."""
        return table.index_select(0, index)

    def attention(
        self, rows: Rows, cosine: Tensor, sine: Tensor, cache: KVCache, wanted: Wanted = slice(None)
    ) -> Attention:
        """For one pass. cosine, sine: fp32 [n, pairs], of each head's first interleaved pairs; the rest stays."""
        ends = accumulate(span.rows for span in rows.spans)
        owns = [slice(end - span.rows, end) for end, span in zip(ends, rows.spans, strict=True)]
        spans = [
            (self._prompts if span.prompt else self._one_token_each)(span, rows.slots[own], rows.positions[own], cache)
            for span, own in zip(rows.spans, owns, strict=True)
        ]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            queries = self._rotated(layer, qkv, cosine, sine, rows, cache)
            parts = [attend_span(layer, queries[own]) for attend_span, own in zip(spans, owns, strict=True)]
            out = (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)
            return out[wanted] if layer == cache.layers - 1 else out

        return attend

    def _rotated(self, layer: int, qkv: Tensor, cosine: Tensor, sine: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        """Queries [n, heads, head_dim], turned; keys, turned, and values are stored."""
        heads = qkv.shape[1] // cache.head_dim - 2 * cache.kv_heads
        qk, values = qkv.view(len(qkv), -1, cache.head_dim).split([heads + cache.kv_heads, cache.kv_heads], 1)
        queries, keys = rotate(qk, cosine, sine).split([heads, cache.kv_heads], 1)
        cache.write(layer, rows.slots, rows.positions, keys, values)
        return queries

    def _one_token_each(self, span: Span, slots: Tensor, positions: Tensor, cache: KVCache) -> Attend:
        """No Python per request. The heads that share a KV head stand where the query positions would: no copy of the
        cache per head. Written out: torch's fused CPU kernel rounds by the thread a row falls to, so by the batch."""
        length = min(cache.capacity, _SPAN_BLOCK * (span.longest // _SPAN_BLOCK + 1))
        beyond = torch.arange(length, device=positions.device) > positions[:, None]
        mask = torch.zeros(beyond.shape, device=positions.device).masked_fill_(beyond, -math.inf)[:, None, None]

        def attend(layer: int, queries: Tensor) -> Tensor:
            keys, values = cache.read(layer, span.slots, length)
            scores = (queries * cache.head_dim**-0.5).unflatten(1, (cache.kv_heads, -1)) @ keys.mT
            return ((scores + mask.to(scores.dtype)).softmax(-1) @ values).flatten(1, 2)

        return attend

    def _prompts(self, span: Span, slots: Tensor, positions: Tensor, cache: KVCache) -> Attend:
        """Of prompts: each token attends to all positions up to its own."""
        count, length = span.rows // span.tokens, span.longest + 1
        seen = positions.view(count, 1, span.tokens, 1) >= torch.arange(length, device=positions.device)

        def attend(layer: int, queries: Tensor) -> Tensor:
            keys, values = cache.read(layer, span.slots, length)
            queries = queries.unflatten(0, (count, span.tokens)).transpose(1, 2)
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
            return out.transpose(1, 2).flatten(0, 1)

        return attend

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [n, width] += y in place (None: nothing); returns RMSNorm(x) · weight."""
        if y is not None:
            x += y
        return F.rms_norm(x, (x.shape[1],), weight, eps)

    def gated(self, layer: Linear) -> Linear:
        """Of a layer whose outputs are [n, 2 · ffn], gate before up: silu(gate) · up [n, ffn]."""
        return lambda x: self.silu_multiply(layer(x))

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[n, 2 · ffn], gate before up, to silu(gate) · up [n, ffn]."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def argmax(self, logits: Tensor) -> Tensor:
        """[n, vocab] to int64 [n]: where each row is largest, the first such place; -1 where it holds NaN or the largest
        is infinite."""
        largest, places = logits.max(-1)  # NaN, where there is one
        return places.masked_fill_(largest * 0 != 0, -1)  # 0 times a number is 0
