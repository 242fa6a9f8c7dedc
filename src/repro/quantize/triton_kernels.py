"""Quantisers for CUDA and ROCm tensors in Triton, with the bytes of `reference`. Import it only where there is Triton.

A program handles a tile of [G, W] values: G neighbouring blocks as rows and, of each, W neighbouring values. Where a
tile lies in a tensor is int64, where a value lies in its tile int32. Scales lie at odd addresses of a payload, so they
are read and written byte by byte.

Three things that would change bits, and how they are kept out: `/` on fp32 is an approximation on NVIDIA, so division
is `div_rn`; a maximum of floats may drop a NaN, so it is one of integers (see `_magnitude`); and a product followed by
a sum may become one fused operation, which the launch of `_decode` forbids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from repro.quantize import reference
from repro.quantize.reference import code_bytes, largest, payload_bytes

_TILE = 4096  # values of a program, unless one block has more
_FUSED = 16384  # longest block that is held in the registers of one program
FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels read and write

_ROUND = tl.constexpr(1.5 * 2**23)  # fp32 has no bits for a fraction up there: adding it rounds, half to even
_FAR = tl.constexpr(2**30)  # beyond any tile
_TINY = tl.constexpr(reference.TINY)
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _widened(x):
    """fp32, bf16 or fp16 to fp32. bf16 is the upper half of an fp32; the interpreter differs on tiny ones."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _narrowed(x):
    """fp32 to the nearest bf16, half to even, NaN to NaN (it could carry into the sign); interpreters truncate."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = tl.where(x == x, bits + ((bits >> 16) & 1) + 0x7FFF, _NAN) >> 16
    return rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _magnitude(x):
    """Bits of fp32 |x| as int32, in the order of the values: infinity above all numbers, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(highest, largest):
    """Bits of the largest |x| of blocks to their fp32 scales, as `reference.scales`."""
    quotient = tl.div_rn(highest.to(tl.float32, bitcast=True), largest)
    finite = tl.where(quotient > _TINY, quotient, _TINY)
    broken = tl.where(highest > _INFINITY, _NAN, highest).to(tl.float32, bitcast=True)
    return tl.where(highest < _INFINITY, finite, broken)


@triton.jit
def _code(x, scale):
    """Codes, in the lowest bits of an int32; 0 beside an infinity or NaN. |x / scale| <= 127.00003: no clamp."""
    rounded = tl.div_rn(x, scale) + _ROUND
    return tl.where(scale < float("inf"), rounded.to(tl.int32, bitcast=True), 0)


@triton.jit
def _store_scales(scales, to, mask):
    """fp32 scales to four bytes each, the lowest first, beginning at the addresses `to`."""
    bits = scales.to(tl.int32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(to + byte, ((bits >> (8 * byte)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _load_scales(at, mask):
    """Inverse of `_store_scales`."""
    bits = tl.load(at, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(at + byte, mask=mask, other=0).to(tl.int32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _small(x):
    """An int64 in 32 bits, to compare offsets in a tile with. By `where`, through which Triton sees what divides it: it
    reads several values at once only where a mask cannot end between them."""
    return tl.where(x < 0, 0, tl.where(x < _FAR, x, _FAR)).to(tl.int32)


@triton.jit
def _tile(tiles, block, n, G: tl.constexpr, W: tl.constexpr):
    """Of this program: its row, its blocks [G], where its tile begins in the row, its values [G, W] as offsets from
    there, and which values there are. 64 bits for each value would cost more than all else that is done with it."""
    program = tl.program_id(0).to(tl.int64)
    row, tile = program // tiles, program % tiles
    pieces = tl.cdiv(block, W)  # of a block; 1 where G > 1
    group, piece = tile // pieces * G, tile % pieces * W
    first, within = group * block + piece, tl.arange(0, W)
    values = tl.arange(0, G)[:, None] * block + within[None, :]
    there = (within < _small(block - piece))[None, :] & (values < _small(n - first))
    return row, group + tl.arange(0, G), first, values, there


@triton.jit
def _quantize_whole(
    x, x_stride, payload, stride, n, half, block, tiles, largest, INT4: tl.constexpr, G: tl.constexpr, W: tl.constexpr
):
    """Codes and scales in one pass: a program holds G whole blocks of the first half and, in INT4, G of the second."""
    row, group, first, values, there = _tile(tiles, block, half, G, W)
    x += row * x_stride + first
    payload += row * stride
    low = _widened(tl.load(x + values, mask=there, other=0))
    scale = _scale(tl.max(_magnitude(low), axis=1), largest)
    _store_scales(scale, payload + half + 4 * group, group * block < half)
    codes = _code(low, scale[:, None])
    if INT4:
        second = half // block + group  # blocks of the second half, where `half` is a multiple of `block`
        high = _widened(tl.load(x + half + values, mask=there & (values < _small(n - half - first)), other=0))
        scale = _scale(tl.max(_magnitude(high), axis=1), largest)
        _store_scales(scale, payload + half + 4 * second, second * block < n)
        codes = (codes & 0xF) | (_code(high, scale[:, None]) << 4)
    tl.store(payload + first + values, (codes & 0xFF).to(tl.uint8), mask=there)


@triton.jit
def _find_highest(x, x_stride, highest, n, block, blocks, tiles, G: tl.constexpr, W: tl.constexpr):
    """Bits of the largest |x| of every block, int32 [rows, blocks], by pieces; `highest` begins as zeros."""
    row, group, first, values, there = _tile(tiles, block, n, G, W)
    x = _widened(tl.load(x + row * x_stride + first + values, mask=there, other=0))
    tl.atomic_max(highest + row * blocks + group, tl.max(_magnitude(x), axis=1), mask=group < blocks)


@triton.jit
def _encode(x, x_stride, scales, payload, stride, n, half, block, blocks, tiles, INT4: tl.constexpr, W: tl.constexpr):
    """Codes of W bytes by known scales, fp32 [rows, blocks]: in INT4 a byte's halves may belong to any blocks."""
    program = tl.program_id(0).to(tl.int64)
    row, at = program // tiles, (program % tiles) * W + tl.arange(0, W)
    x += row * x_stride
    scales += row * blocks
    there = at < half
    low = _widened(tl.load(x + at, mask=there, other=0))
    codes = _code(low, tl.load(scales + at // block, mask=there, other=1))
    if INT4:
        up = half + at
        high = _widened(tl.load(x + up, mask=up < n, other=0))
        codes = (codes & 0xF) | (_code(high, tl.load(scales + up // block, mask=up < n, other=1)) << 4)
    tl.store(payload + row * stride + at, (codes & 0xFF).to(tl.uint8), mask=there)


@triton.jit
def _put(out, codes, scale, there, ADD: tl.constexpr):
    """Values of codes [G, W] and scales [G], stored at `out` or added to what is there."""
    result = codes.to(tl.float32) * scale[:, None]
    if ADD:
        result += tl.load(out, mask=there, other=0)
    if out.dtype.element_ty == tl.bfloat16:
        result = _narrowed(result)
    tl.store(out, result, mask=there)


@triton.jit
def _decode(
    payload,
    stride,
    out,
    out_stride,
    n,
    half,
    block,
    tiles,
    ADD: tl.constexpr,
    INT4: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
):
    """Values of payloads, stored or added to what is there."""
    row, group, first, values, there = _tile(tiles, block, n, G, W)
    payload += row * stride
    scale = _load_scales(payload + half + 4 * group, group * block < n)
    if INT4:
        high = values >= _small(half - first)
        byte = tl.load(payload + first + (values - tl.where(high, half, 0)), mask=there, other=0).to(tl.int32)
        codes = (byte << tl.where(high, 24, 28)) >> 28
    else:
        codes = (tl.load(payload + first + values, mask=there, other=0).to(tl.int32) << 24) >> 24
    _put(out + row * out_stride + first + values, codes, scale, there, ADD)


@triton.jit
def _decode_both(
    payload, stride, out, out_stride, n, half, block, tiles, ADD: tl.constexpr, G: tl.constexpr, W: tl.constexpr
):
    """INT4 where the second half begins with a block: each byte is read once, for a value of either half."""
    row, group, first, values, there = _tile(tiles, block, half, G, W)
    payload += row * stride
    out += row * out_stride + first + values
    byte = tl.load(payload + first + values, mask=there, other=0).to(tl.int32)
    _put(out, (byte << 28) >> 28, _load_scales(payload + half + 4 * group, group * block < half), there, ADD)
    second = half // block + group
    scale = _load_scales(payload + half + 4 * second, second * block < n)
    _put(out + half, (byte << 24) >> 28, scale, there & (values < _small(n - half - first)), ADD)


def quantize(x: Tensor, bits: int, block: int) -> Tensor:
    """[rows, n] of a dtype in `FLOATS`, not empty, adjacent within a row, to uint8 [rows, payload_bytes(..)]."""
    rows, n = x.shape
    payload = x.new_empty((rows, payload_bytes(n, bits, block)), dtype=torch.uint8)
    half = code_bytes(n, bits)  # a byte of codes has a value of the first half
    block, blocks = min(block, n), -(-n // block)
    x_stride, stride = x.stride(0), payload.stride(0)
    with torch.cuda.device_of(x):
        if block <= _FUSED and (bits == 8 or half % block == 0):
            G, W, tiles = _tiling(block, -(-half // block), _FUSED)
            _quantize_whole[(rows * tiles,)](
                x, x_stride, payload, stride, n, half, block, tiles, float(largest(bits)),
                INT4=bits == 4, G=G, W=W, num_warps=_warps(G * W), enable_fp_fusion=False,
            )  # fmt: skip
            return payload
        highest = torch.zeros((rows, blocks), dtype=torch.int32, device=x.device)
        G, W, tiles = _tiling(block, blocks, _TILE)
        _find_highest[(rows * tiles,)](x, x_stride, highest, n, block, blocks, tiles, G=G, W=W, enable_fp_fusion=False)
        scales = reference.scales(highest.view(torch.float32), bits)
        payload[:, half:] = scales.view(torch.uint8)
        tiles = triton.cdiv(half, 1024)
        _encode[(rows * tiles,)](
            x, x_stride, scales, payload, stride, n, half, block, blocks, tiles,
            INT4=bits == 4, W=1024, enable_fp_fusion=False,
        )  # fmt: skip
    return payload


def decode(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
    """Values of payloads of `quantize`, adjacent within a row, stored in `out` or added to it: [rows, n] of a dtype in
    `FLOATS`, not empty, adjacent within a row."""
    rows, n = out.shape
    half = code_bytes(n, bits)
    block, blocks = min(block, n), -(-n // block)
    both = bits == 4 and half % block == 0
    kernel, fixed = (_decode_both, {}) if both else (_decode, {"INT4": bits == 4})
    G, W, tiles = _tiling(block, half // block if both else blocks, _TILE)
    with torch.cuda.device_of(out):
        kernel[(rows * tiles,)](
            payload, payload.stride(0), out, out.stride(0), n, half, block, tiles,
            ADD=add, G=G, W=W, num_warps=_warps(G * W), enable_fp_fusion=False, **fixed,
        )  # fmt: skip


def _tiling(block: int, blocks: int, widest: int) -> tuple[int, int, int]:
    """Shape [G, W] of a tile, W at most `widest`, and how many tiles cover a row of `blocks` blocks."""
    W = min(triton.next_power_of_2(block), widest)
    G = max(1, _TILE // W)
    return G, W, triton.cdiv(blocks, G) * triton.cdiv(block, W)


def _warps(values: int) -> int:
    """Warps of a program: 4 up to a tile of usual size, 16 for the longest block."""
    return max(4, min(16, values // 1024))
