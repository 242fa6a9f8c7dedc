"""The definition of the quantisers in eager torch, on any device: short and slow. The others give the same bytes.

What a payload holds is described in the package's docstring. Arguments are checked there; a [rows, n] tensor is
quantised row by row, and leading dimensions of payloads are kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = (8, 4)
TINY = torch.finfo(torch.float32).tiny  # smallest scale: keeps x / scale finite in a block of zeros without a branch


def check(bits: int, block: int) -> None:
    """ValueError unless there is a format of `bits` and `block` is at least one value."""
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, allowed: {', '.join(map(str, BITS))}")
    if block < 1:
        raise ValueError(f"block is {block}, must be at least 1")


def largest(bits: int) -> int:
    """Largest code: the range is symmetric, so the most negative integer is never used."""
    return 2 ** (bits - 1) - 1


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes of `numel` values, after which the scales begin. INT4: two codes per byte, rounded up."""
    return -(-numel * bits // 8)


def payload_bytes(numel: int, bits: int, block: int) -> int:
    """Bytes of a payload of `numel` values: codes, one fp32 scale per started block. ValueError as in `check`."""
    check(bits, block)
    return code_bytes(numel, bits) + 4 * -(-numel // block)


def quantize(x: Tensor, bits: int, block: int) -> Tensor:
    """Float tensor [.., n] of any float dtype to its payload, uint8 [.., payload_bytes(n, bits, block)]."""
    blocks, top = _blocks(x.float(), block), largest(bits)
    low, high = torch.aminmax(blocks, dim=-1)
    scale = scales(torch.maximum(high, -low), bits)
    codes = (blocks / scale[..., None]).round_().clamp_(-top, top)
    # Beside an infinity or a NaN, x / scale is 0 or NaN. What integer a NaN turns into depends on the processor, so it
    # is said here.
    codes = codes.nan_to_num_(0.0).to(torch.int8).flatten(-2)[..., : x.shape[-1]]
    if bits == 4:
        codes = _pack(codes)
    return torch.cat((codes.view(torch.uint8), scale.view(torch.uint8)), dim=-1)


def dequantize(payload: Tensor, numel: int, bits: int, block: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Payload of `quantize` back to [.., numel] of `dtype`: the fp32 product code * scale, rounded once."""
    if numel == 0:
        return payload.to(dtype)
    split = code_bytes(numel, bits)
    codes = payload[..., :split].view(torch.int8)
    scale = payload[..., split:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned to 4 bytes
    if bits == 4:
        codes = _unpack(codes, numel)
    return (_blocks(codes, block) * scale[..., None]).flatten(-2)[..., :numel].to(dtype)


def scales(highest: Tensor, bits: int) -> Tensor:
    """Largest |x| of each block, fp32, to its scale: infinity stays, and every NaN becomes the same one.

    The divisor is a tensor because torch multiplies by the rounded reciprocal of a Python number on CUDA.
    """
    scale = (highest / highest.new_full((), largest(bits))).clamp_min(TINY)
    return scale.masked_fill(scale.isnan(), torch.nan)


def _blocks(x: Tensor, block: int) -> Tensor:
    """[.., n] to [.., ceil(n / block), block], filled up with zeros. A block longer than the tensor is cut."""
    block = max(1, min(block, x.shape[-1]))
    missing = -x.shape[-1] % block
    return (F.pad(x, (0, missing)) if missing else x).unflatten(-1, (-(-x.shape[-1] // block), block))


def _pack(codes: Tensor) -> Tensor:
    """INT4 codes, int8 [.., n] in -7..7, to int8 [.., ceil(n / 2)]: first half in the low nibbles."""
    low, high = F.pad(codes, (0, codes.shape[-1] % 2)).view(torch.uint8).chunk(2, dim=-1)
    return ((low & 0xF) | (high << 4)).view(torch.int8)


def _unpack(packed: Tensor, numel: int) -> Tensor:
    """Inverse of `_pack`: int8 [.., ceil(n / 2)] to int8 [.., n]. Shifts of int8 restore the sign."""
    return torch.cat(((packed << 4) >> 4, packed >> 4), dim=-1)[..., :numel]
