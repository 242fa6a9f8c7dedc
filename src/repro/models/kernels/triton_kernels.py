"""The steps between matrix products on CUDA and ROCm, in Triton. Import this module only where there is Triton.

Rows that decode read keys and values where they lie, in slots or blocks, and nothing of a launch depends on where that
is or how long a request has become: slots, positions and the table of blocks are read on the device. So a pass can be
recorded as a CUDA graph once and be replayed for any rows (`flover/cuda_graph.py`). Prompts attend in tiles of queries,
and read keys and values where they lie as well.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from repro.models.kernels.torch_kernels import Attend, Kernels
from repro.models.kv_cache import KVCache
from repro.models.rows import Rows, Span

_SPLIT = 128  # positions that one program attends to: a single request of many positions still keeps a whole GPU busy
_SPLITS = 128  # of a row at most, beyond which a program attends to more positions
_BLOCK = 32  # positions at once
_TILE = 64  # queries of prompts at once
_TILE_BLOCK, _TILE_BYTES = 64, 16384  # positions at once, and bytes of their keys: what the core of a small GPU holds
_LEAST = 16  # of everything that matrix units multiply


@triton.jit
def _place(table, slot, position, block, width, HAS_TABLE: tl.constexpr):
    """Block and position in it, int64, of a slot's position."""
    if HAS_TABLE:
        return tl.load(table + slot * width + position // block), position % block
    return slot + position * 0, position


@triton.jit
def _rotate_store(
    qkv,
    cosine,
    sine,
    slots,
    positions,
    keys,
    values,
    table,
    queries,
    heads,
    kv_heads,
    block,
    width,
    pairs,
    dim,
    HALF: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """One head of one row: a query turns and is written out, a key turns and is stored, a value is stored."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, HALF)
    there, second = 2 * i < dim, 2 * i + 1 < dim  # a head may end in the middle of a pair, which does not turn
    x = qkv + (row * (heads + 2 * kv_heads) + head) * dim + 2 * i
    even, odd = tl.load(x, mask=there, other=0), tl.load(x + 1, mask=second, other=0)
    if head < heads + kv_heads:
        turns = i < pairs  # the rest of a head stays
        c = tl.load(cosine + row * pairs + i, mask=turns, other=1.0)
        s = tl.load(sine + row * pairs + i, mask=turns, other=0.0)
        a, b = even.to(tl.float32), odd.to(tl.float32)
        even, odd = (a * c - b * s).to(even.dtype), (b * c + a * s).to(odd.dtype)
    if head < heads:
        to = queries + (row * heads + head) * dim + 2 * i
        tl.store(to, even, mask=there)
        tl.store(to + 1, odd, mask=second)
    else:
        index, inside = _place(table, tl.load(slots + row), tl.load(positions + row), block, width, HAS_TABLE)
        stored = (head - heads) % kv_heads
        offset = ((index * kv_heads + stored) * block + inside) * dim + 2 * i
        if head < heads + kv_heads:
            tl.store(keys + offset, even, mask=there)
            tl.store(keys + offset + 1, odd, mask=second)
        else:
            tl.store(values + offset, even, mask=there)
            tl.store(values + offset + 1, odd, mask=second)


@triton.jit
def _weighted(
    query,
    slot,
    position,
    kv_head,
    start,
    stop,
    keys,
    values,
    table,
    scale,
    kv_heads,
    block,
    width,
    dim,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Queries [TILE, DIM] over the positions from `start` to `stop` that each may see, up to its own `position` [TILE]:
    the highest score, the sum of the weights exp(score - highest), and the values summed by weight [TILE, DIM]. Corrected
    block by block, as in FlashAttention (Dao et al. 2022)."""
    d = tl.arange(0, DIM)
    highest, total = tl.full([TILE], -float("inf"), tl.float32), tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, DIM], tl.float32)
    for first in range(start, stop, BLOCK):
        t = first + tl.arange(0, BLOCK).to(tl.int64)
        stored = t < stop
        index, inside = _place(table, slot, tl.where(stored, t, 0), block, width, HAS_TABLE)
        offset = (((index * kv_heads + kv_head) * block + inside) * dim)[:, None] + d[None, :]
        there = stored[:, None] & (d < dim)[None, :]
        k = tl.load(keys + offset, mask=there, other=0)
        v = tl.load(values + offset, mask=there, other=0)
        score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(stored[None, :] & (t[None, :] <= position[:, None]), score, -float("inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        weight, fade = tl.exp(score - higher[:, None]), tl.exp(highest - higher)
        sums = sums * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * fade + tl.sum(weight, axis=1)
        highest = higher
    return highest, total, sums


@triton.jit
def _attend_split(
    queries,
    slots,
    positions,
    keys,
    values,
    table,
    sums,
    marks,
    scale,
    heads,
    kv_heads,
    block,
    width,
    dim,
    splits,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """The heads of one row that share a KV head, over one stretch of positions: values summed by weight, [dim] each in
    `sums`, and the highest score and the sum of weights in `marks`. Nothing where the row has not come so far."""
    row, kv_head, start = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * SPLIT
    slot, position = tl.load(slots + row), tl.load(positions + row)
    if start > position:
        return
    group, i, d = heads // kv_heads, tl.arange(0, TILE), tl.arange(0, DIM)
    head, asked = row * heads + kv_head * group + i, i < group
    there = asked[:, None] & (d < dim)[None, :]
    query = tl.load(queries + head[:, None] * dim + d[None, :], mask=there, other=0)
    highest, total, part = _weighted(
        query, slot, position + tl.zeros([TILE], tl.int64), kv_head, start, tl.minimum(start + SPLIT, position + 1),
        keys, values, table, scale, kv_heads, block, width, dim, DIM, TILE, BLOCK, HAS_TABLE,
    )  # fmt: skip
    place = head * splits + tl.program_id(2)
    tl.store(sums + place[:, None] * dim + d[None, :], part, mask=there)
    tl.store(marks + 2 * place, highest, mask=asked)
    tl.store(marks + 2 * place + 1, total, mask=asked)


@triton.jit
def _attend_join(
    sums, marks, positions, out, heads, dim, splits, DIM: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr
):
    """One head of one row: its stretches joined."""
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    some = s <= tl.load(positions + head // heads) // SPLIT
    mark = marks + 2 * (head * splits + s)
    highest = tl.load(mark, mask=some, other=-float("inf"))
    weight = tl.exp(highest - tl.max(highest, axis=0))
    total = tl.sum(weight * tl.load(mark + 1, mask=some, other=0.0), axis=0)
    part = tl.load(
        sums + (head * splits + s)[:, None] * dim + d[None, :], mask=some[:, None] & (d < dim)[None, :], other=0.0
    )
    joined = tl.sum(weight[:, None] * part, axis=0) / total
    tl.store(out + head * dim + d, joined.to(out.dtype.element_ty), mask=d < dim)


@triton.jit
def _attend_tile(
    queries,
    slots,
    positions,
    keys,
    values,
    table,
    out,
    scale,
    heads,
    kv_heads,
    block,
    width,
    dim,
    tokens,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    """Some queries of one KV head of a prompt, or of a chunk of one: `tokens` rows, and in each row the heads that share
    the KV head."""
    part, kv_head, first = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64) * tokens
    group = heads // kv_heads
    i, d = part * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
    asked = i < tokens * group
    row = first + tl.minimum(i // group, tokens - 1)
    place = ((row * heads + kv_head * group + i % group) * dim)[:, None] + d[None, :]
    there = asked[:, None] & (d < dim)[None, :]
    query = tl.load(queries + place, mask=there, other=0)
    slot, position = tl.load(slots + first), tl.load(positions + row)
    stop = tl.max(tl.where(asked, position, 0), axis=0) + 1
    _, total, sums = _weighted(
        query, slot, position, kv_head, 0, stop,
        keys, values, table, scale, kv_heads, block, width, dim, DIM, TILE, BLOCK, HAS_TABLE,
    )  # fmt: skip
    tl.store(out + place, (sums / total[:, None]).to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_norm(x, y, weight, out, width, eps, HAS_Y: tl.constexpr, WIDTH: tl.constexpr):
    """One row: x += y, and x over the root of its mean square, times the weight."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    there = i < width
    a = tl.load(x + row * width + i, mask=there, other=0)
    if HAS_Y:
        b = tl.load(y + row * width + i, mask=there, other=0)
        a = (a.to(tl.float32) + b.to(tl.float32)).to(a.dtype)
        tl.store(x + row * width + i, a, mask=there)
    a = a.to(tl.float32)
    factor = tl.rsqrt(tl.sum(a * a, axis=0) / width + eps)
    w = tl.load(weight + i, mask=there, other=0).to(tl.float32)
    tl.store(out + row * width + i, (a * factor * w).to(out.dtype.element_ty), mask=there)


@triton.jit
def _silu_multiply(gate_up, out, width, WIDTH: tl.constexpr):
    """Some entries of one row."""
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=there, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=there, other=0).to(tl.float32)
    tl.store(out + row * width + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=there)


class TritonKernels(Kernels):
    """On a GPU, in float32, bfloat16 and float16; linear layers and argmax are those of torch."""

    name = "Triton"
    capturable = True

    def _rotated(self, layer: int, qkv: Tensor, cosine: Tensor, sine: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        place, sizes = _lying(cache, layer, rows.slots, rows.positions)
        pairs, dim = cosine.shape[1], cache.head_dim
        heads = qkv.shape[1] // dim - 2 * cache.kv_heads
        queries = qkv.new_empty(len(qkv), heads, dim)
        fixed = {"HALF": triton.next_power_of_2(triton.cdiv(dim, 2)), "HAS_TABLE": sizes[-1] > 0}
        _rotate_store[(len(qkv), heads + 2 * cache.kv_heads)](
            qkv.contiguous(), cosine, sine, *place, queries, heads, *sizes, pairs, dim, **fixed
        )
        return queries

    def _one_token_each(self, span: Span, slots: Tensor, positions: Tensor, cache: KVCache) -> Attend:
        dim, split = cache.head_dim, max(_SPLIT, triton.next_power_of_2(triton.cdiv(cache.capacity, _SPLITS)))
        splits, wide = triton.cdiv(cache.capacity, split), _padded(dim)

        def attend(layer: int, queries: Tensor) -> Tensor:
            place, sizes = _lying(cache, layer, slots, positions)
            rows, heads, _ = queries.shape
            sums = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=queries.device)
            marks = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=queries.device)
            out = torch.empty_like(queries)
            fixed = {"DIM": wide, "TILE": _padded(heads // cache.kv_heads), "SPLIT": split, "BLOCK": _BLOCK}
            _attend_split[(rows, cache.kv_heads, splits)](
                queries, *place, sums, marks, dim**-0.5, heads, *sizes, dim, splits,
                HAS_TABLE=sizes[-1] > 0, **fixed,
            )  # fmt: skip
            _attend_join[(rows * heads,)](
                sums, marks, positions, out, heads, dim, splits,
                DIM=wide, SPLIT=split, SPLITS=triton.next_power_of_2(splits),
            )  # fmt: skip
            return out

        return attend

    def _prompts(self, span: Span, slots: Tensor, positions: Tensor, cache: KVCache) -> Attend:
        dim = cache.head_dim
        block = min(_TILE_BLOCK, _TILE_BYTES // (_padded(dim) * cache.keys.element_size()))

        def attend(layer: int, queries: Tensor) -> Tensor:
            place, sizes = _lying(cache, layer, slots, positions)
            heads, out = queries.shape[1], torch.empty_like(queries)
            parts = triton.cdiv(span.tokens * heads // cache.kv_heads, _TILE)
            fixed = {"DIM": _padded(dim), "TILE": _TILE, "BLOCK": block}
            _attend_tile[(parts, cache.kv_heads, span.rows // span.tokens)](
                queries, *place, out, dim**-0.5, heads, *sizes, dim, span.tokens, HAS_TABLE=sizes[-1] > 0, **fixed
            )
            return out

        return attend

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        wide = triton.next_power_of_2(x.shape[1])
        _add_norm[(len(x),)](x, x if y is None else y, weight, out, x.shape[1], eps, HAS_Y=y is not None, WIDTH=wide)
        return out

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        _silu_multiply[(rows, triton.cdiv(width, 1024))](gate_up, out, width, WIDTH=1024)
        return out


def _padded(size: int) -> int:
    return max(_LEAST, triton.next_power_of_2(size))


def _lying(cache: KVCache, layer: int, slots: Tensor, positions: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The arguments `slots` … `table` and `kv_heads`, `block`, `width` of a kernel; the last is 0 without a table."""
    keys, values, table = cache.parts(layer)
    width = 0 if table is None else table.shape[1]
    return (slots, positions, keys, values, slots if table is None else table), (*keys.shape[1:3], width)
