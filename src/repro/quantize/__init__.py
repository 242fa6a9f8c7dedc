"""Blockwise symmetric INT8 and INT4 quantisation of flat tensors, as ZeRO++ sends weights (qwZ) and gradients (qgZ).

A tensor of n values becomes one flat uint8 payload: the codes, then one fp32 scale per block of `block` values.

    scale = max |x| of the block / (2^(bits-1) - 1)        code = round(x / scale)        x' = code * scale

so |x - x'| <= scale / 2 for every value. DeepSpeed's kernel divides by 2^(bits-1) instead and clamps
the largest positive value down by a whole step; the symmetric range here keeps the bound, and treats both signs alike
(-x decodes to -x').

INT8 codes are one byte each. INT4 packs code i of the first half of the tensor and code i of the second half into byte
i (low and high nibble): both halves stay contiguous, which vectorises better than interleaving neighbours.

    payload of n values, INT4, h = ceil(n / 2), n even (n odd: the last high nibble is 0, and c[n-1] one byte earlier)
    | c[h] c[0] | c[h+1] c[1] | .. | c[n-1] c[h-1] | scale[0], 4 bytes | .. | scale[ceil(n / block) - 1] |

Three implementations give the same bytes for every input, so ranks with and without a GPU could talk to each other:

    reference.py         eager torch on any device: the definition
    cpu.py               numba, CPU
    triton_kernels.py    Triton, CUDA and ROCm (torch's wheels for them bring Triton)
"""

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from repro.quantize import cpu, reference
from repro.quantize.cpu import warm_up
from repro.quantize.reference import BITS, payload_bytes

__all__ = ["BITS", "accumulate", "dequantize", "payload_bytes", "quantize", "warm_up"]


def quantize(x: Tensor, bits: int, block: int) -> Tensor:
    """Float tensor [n] or [rows, n] of any float dtype to its payload, uint8 [payload_bytes(n, bits, block)] (per row).

    A block that holds an infinity or a NaN gets codes of 0 and that as its scale, and decodes to NaN: an overflow stays
    visible on the other side.
    Raises ValueError for a tensor of other dimensions or not of a float dtype, for `bits` not in BITS, and `block` < 1.
    """
    reference.check(bits, block)
    if x.dim() not in (1, 2) or not x.is_floating_point():
        raise ValueError(f"needs a floating-point tensor [n] or [rows, n], found {x.dtype} {tuple(x.shape)}")
    if (kernels := _kernels(x)) is None:
        return reference.quantize(x, bits, block)
    floats = x.detach() if x.dtype in kernels.FLOATS else x.detach().float()
    return kernels.quantize(_rows(floats), bits, block).view(*x.shape[:-1], -1)


def dequantize(
    payload: Tensor,
    numel: int,
    bits: int,
    block: int,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Payload of `quantize` back to [numel], or [rows, numel], of `dtype`; with `out` into that, in its dtype.

    Raises ValueError when the payload has another length or dtype, or `out` another shape.
    """
    _check_payload(payload, numel, bits, block)
    shape = (*payload.shape[:-1], numel)
    if out is None:
        out = payload.new_empty(shape, dtype=dtype)
    elif out.shape != shape:
        raise ValueError(f"out is {tuple(out.shape)}, but the payload holds {shape}")
    return _decode(payload, out, bits, block, add=False)


def accumulate(payload: Tensor, total: Tensor, bits: int, block: int) -> None:
    """Add the values of a payload to `total`, fp32 [n] or [rows, n], in place: `total += dequantize(..)` in one pass.

    Raises ValueError when the payload has another length or dtype, or `total` another shape or dtype.
    """
    _check_payload(payload, total.shape[-1], bits, block)
    if total.dtype != torch.float32 or total.shape[:-1] != payload.shape[:-1]:
        raise ValueError(
            f"total is {total.dtype} {tuple(total.shape)}, the payload {tuple(payload.shape)}: needs fp32 rows alike"
        )
    _decode(payload, total, bits, block, add=True)


def _decode(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> Tensor:
    """Values of a payload, stored in `out` or added to it, which is fp32 then. Returns `out`."""
    numel = out.shape[-1]
    if (kernels := _kernels(payload, written=out)) is None:
        values = reference.dequantize(payload, numel, bits, block, out.dtype)
        return out.add_(values) if add else out.copy_(values)
    if out.dtype not in kernels.FLOATS:
        return out.copy_(dequantize(payload, numel, bits, block))
    kernels.decode(_rows(payload), _rows(out.detach()), bits, block, add)
    torch.autograd.graph.increment_version(out)  # which a kernel writes behind autograd's back
    return out


def _check_payload(payload: Tensor, numel: int, bits: int, block: int) -> None:
    if payload.shape[-1] != payload_bytes(numel, bits, block):
        raise ValueError(
            f"payload of {payload.shape[-1]} bytes, but {numel} values in INT{bits} with blocks of {block} "
            f"take {payload_bytes(numel, bits, block)}"
        )
    if payload.dtype != torch.uint8:
        raise ValueError(f"payload is {payload.dtype}, not uint8")


def _kernels(x: Tensor, written: Tensor | None = None) -> ModuleType | None:
    """The implementation for tensors that are read and written; None: the reference.

    Kernels need memory: tensor subclasses (FakeTensor, DTensor) have none of their own, and compilers and dispatch
    modes follow torch's operators. What is written must not overlap itself, and autograd must not have to know.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return None
    for tensor in (x,) if written is None else (x, written):
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.device != x.device or tensor.dim() > 2 or tensor.numel() == 0:
            return None
    if written is not None:
        strides = written.stride()
        scattered = strides[-1] != 1 or strides[0] < (written.shape[-1] if written.dim() == 2 else 1)
        if scattered or (written.requires_grad and torch.is_grad_enabled()):
            return None
    if x.device.type == "cpu":
        return cpu
    return _triton() if x.device.type == "cuda" else None


@functools.cache
def _triton() -> ModuleType | None:
    """The Triton kernels, for CUDA and ROCm tensors; None without Triton (the reference then runs, slowly)."""
    try:
        from repro.quantize import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def _rows(x: Tensor) -> Tensor:
    """[n] or [rows, n] as [rows, n], neighbours of a row at neighbouring addresses: a view of x, or else a copy."""
    return torch.atleast_2d(x if x.stride(-1) == 1 else x.contiguous())
