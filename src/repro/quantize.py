"""Blockwise symmetric INT8 and INT4 quantisation of flat tensors, as ZeRO++ sends weights (qwZ) and gradients (qgZ).

A tensor of n values becomes one flat uint8 payload: the codes, then one fp32 scale per block of `block` values.

    scale = max |x| of the block / (2^(bits-1) - 1)        code = clamp(round(x / scale))        x' = code * scale

so |x - x'| <= scale / 2 for every value (`error_bound`). DeepSpeed's kernel divides by 2^(bits-1) instead and clamps the
largest positive value down by a whole step; the symmetric range here keeps the bound, and the mean of x' unbiased.

INT8 codes are one byte each. INT4 packs code i of the first half of the tensor and code i of the second half into byte i
(low and high nibble): both halves stay contiguous, which vectorises better than interleaving neighbours.

This is the reference in eager torch; it runs on any device. Faster kernels must give the same bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (8, 4)
_TINY = torch.finfo(torch.float32).tiny  # scale of a block of zeros: keeps x / scale finite without a branch


def _check(bits: int, block: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, allowed: {', '.join(map(str, BITS))}")
    if block < 1:
        raise ValueError(f"block is {block}, must be at least 1")


def payload_bytes(numel: int, bits: int, block: int) -> int:
    """Bytes of the payload of `numel` values: codes (INT4: two per byte, rounded up) and one fp32 scale per started block."""
    _check(bits, block)
    return -(-numel * bits // 8) + 4 * -(-numel // block)


def quantize(x: Tensor, bits: int, block: int) -> Tensor:
    """Float tensor [n] or [rows, n] of any float dtype to its payload, uint8 [payload_bytes(n, bits, block)] (per row).

    A block that holds an infinity or a NaN decodes to NaN: an overflow stays visible on the other side.
    Raises ValueError for a tensor with more dimensions or not of a float dtype, and for unknown bits or block.
    """
    _check(bits, block)
    if x.dim() not in (1, 2) or not x.is_floating_point():
        raise ValueError(f"needs a floating-point tensor [n] or [rows, n], found {x.dtype} {tuple(x.shape)}")
    largest = 2 ** (bits - 1) - 1
    blocks, scale = _scaled(x, largest, block)
    codes = (blocks / scale[..., None]).round_().clamp_(-largest, largest).to(torch.int8)
    codes = codes.flatten(-2)[..., : x.shape[-1]]
    if bits == 4:
        codes = _pack(codes)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=-1)


def dequantize(payload: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Payload of `quantize` back to [numel], or [rows, numel], of `dtype`. ValueError when the payload has another length."""
    if payload.shape[-1] != payload_bytes(numel, bits, block):
        raise ValueError(
            f"payload of {payload.shape[-1]} bytes, but {numel} values in INT{bits} with blocks of {block} "
            f"take {payload_bytes(numel, bits, block)}"
        )
    split = -(-numel * bits // 8)
    codes = payload[..., :split].view(torch.int8)
    scale = payload[..., split:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned to 4 bytes
    if bits == 4:
        codes = _unpack(codes, numel)
    return (_blocks(codes, block) * scale[..., None]).flatten(-2)[..., :numel].to(dtype)


def error_bound(x: Tensor, bits: int, block: int) -> Tensor:
    """Largest |x - dequantize(quantize(x))| per value, fp32, shaped like x: half a step of its block (and a little for the
    fp32 rounding of x / scale). Decoding to a 16-bit dtype rounds once more, in that dtype."""
    _, scale = _scaled(x, 2 ** (bits - 1) - 1, block)
    return (scale * (0.5 + 2e-5)).repeat_interleave(block, dim=-1)[..., : x.shape[-1]]


def _blocks(x: Tensor, block: int) -> Tensor:
    """[.., n] to [.., ceil(n / block), block], the last block filled up with zeros."""
    missing = -x.shape[-1] % block
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-(-x.shape[-1] // block), block))


def _scaled(x: Tensor, largest: int, block: int) -> tuple[Tensor, Tensor]:
    """Blocks of x in fp32 and their scales [.., blocks]: the largest absolute value becomes code `largest`."""
    blocks = _blocks(x.float(), block)
    low, high = torch.aminmax(blocks, dim=-1)
    return blocks, (torch.maximum(high, -low) / largest).clamp_min(_TINY)


def _pack(codes: Tensor) -> Tensor:
    """INT4 codes, int8 [.., n] in -7..7, to int8 [.., ceil(n / 2)]: first half in the low nibbles, second in the high ones."""
    low, high = F.pad(codes, (0, codes.shape[-1] % 2)).view(torch.uint8).chunk(2, dim=-1)
    return ((low & 0xF) | (high << 4)).view(torch.int8)


def _unpack(packed: Tensor, numel: int) -> Tensor:
    """Inverse of `_pack`: int8 [.., ceil(n / 2)] to int8 [.., n]. Shifts of int8 are arithmetic, so they restore the sign."""
    return torch.cat(((packed << 4) >> 4, packed >> 4), dim=-1)[..., :numel]
