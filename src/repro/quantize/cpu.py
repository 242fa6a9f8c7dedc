"""Quantisers for CPU tensors near the speed of memory: numba loops that LLVM vectorises, with the bytes of `reference`.

Single-threaded, since every rank is a process with about one core to itself. The kernels walk rows of flat arrays of
words, so that a row may be part of a larger tensor:

  x, out   uint32 (fp32) or uint16 (bf16, which is the upper half of an fp32): the bits of values
  codes    uint8: INT8 has a value per byte, INT4 has value i in the low and value i + half in the high nibble of byte i
  scales   float32 [rows, blocks]: in a payload they may lie at odd addresses, so they are copied out and in
  half     values of a row before the high nibbles begin: ceil(n / 2) in INT4, n in INT8, which has no high nibbles

error_model="numpy" leaves out Python's test of every divisor for zero, and the casts to 32 bits keep numba from
computing in 64: a loop with either would not be vectorised.
"""

import numpy as np
import torch
from torch import Tensor

from repro.compiled import compiled
from repro.quantize.reference import BITS, TINY, code_bytes, payload_bytes

_ROUND = np.float32(1.5 * 2**23)  # fp32 has no bits for a fraction up there: adding it rounds, half to even
_TINY = np.float32(TINY)
_INFINITY = np.uint32(0x7F800000)
_NAN = np.uint32(0x7FC00000)
_BF16 = np.dtype(np.uint16)
_WORDS = {torch.float32: torch.uint32, torch.bfloat16: torch.uint16}
FLOATS = tuple(_WORDS)  # what the kernels read and write

_compiled = compiled(nogil=True, error_model="numpy")


@_compiled
def _bits(x: np.ndarray, i: int) -> np.uint32:
    """Bits of value i as an fp32."""
    return np.uint32(np.uint32(x[i]) << 16 if x.dtype == _BF16 else x[i])


@_compiled
def _highest(x: np.ndarray) -> np.uint32:
    """Bits of the largest |value|.

    Without the sign, the bits of floats are in the order of their values, infinity above all numbers and NaN above
    infinity. Unlike floats, integers may be compared in any order, which is what it takes to vectorise a maximum.
    """
    highest = np.uint32(0)
    for i in range(x.size):
        highest = max(highest, np.uint32(_bits(x, i) & 0x7FFFFFFF))
    return highest


@_compiled
def _encode_run(x: np.ndarray, scale: np.floating, mask: np.unsignedinteger, high: bool, codes: np.ndarray) -> None:
    """Codes of finite values of one block, stored, or added as high nibbles of bytes that have their low ones.

    The lowest bits of the rounded sum are the code. |x / scale| is at most 127.00003, so there is nothing to clamp.
    """
    for i in range(x.size):
        value = np.uint32(_bits(x, i)).view(np.float32)
        code = np.float32(value / scale + _ROUND).view(np.uint32) & mask
        if high:
            codes[i] |= np.uint8(code << 4)
        else:
            codes[i] = np.uint8(code)


@_compiled
def _encode(
    x: np.ndarray, x_stride: int, n: int, bits: int, block: int, codes: np.ndarray, stride: int, scales: np.ndarray
) -> None:
    """Codes and scales of rows of n values; rows are `x_stride` words of x and `stride` bytes of codes apart."""
    half = n if bits == 8 else (n + 1) // 2
    mask = np.uint32((1 << bits) - 1)
    largest = np.float32((1 << (bits - 1)) - 1)
    rows, blocks = scales.shape
    for row in range(rows):
        values = x[row * x_stride : row * x_stride + n]
        packed = codes[row * stride : row * stride + half]
        for b in range(blocks):
            start, stop = b * block, min(n, (b + 1) * block)
            low_stop, high_start = min(stop, half), max(start, half)
            highest = np.uint32(_highest(values[start:stop]))
            if highest < _INFINITY:
                scale = max(highest.view(np.float32) / largest, _TINY)
                if start < low_stop:
                    _encode_run(values[start:low_stop], scale, mask, False, packed[start:low_stop])
                if high_start < stop:
                    _encode_run(values[high_start:stop], scale, mask, True, packed[high_start - half : stop - half])
            else:  # codes of 0: nothing to add to a high nibble
                scale = np.uint32(highest if highest == _INFINITY else _NAN).view(np.float32)
                for i in range(start, low_stop):
                    packed[i] = 0
            scales[row, b] = scale


@_compiled
def _decode_run(codes: np.ndarray, left: int, right: int, scale: float, add: bool, out: np.ndarray) -> None:
    """Values of one block, stored or added. Two shifts of a byte as an int32 cut out its code, with its sign."""
    for i in range(out.size):
        value = np.float32(np.int32(np.int32(np.uint32(codes[i]) << left) >> right)) * scale
        if add:
            value += np.uint32(_bits(out, i)).view(np.float32)
        word = np.float32(value).view(np.uint32)
        if out.dtype == _BF16:  # the nearest, half to even; the bits of a NaN could carry over into the sign
            word = np.uint32(word + (np.uint32(word >> 16) & 1) + 0x7FFF) if value == value else _NAN
            word = np.uint32(word >> 16)
        out[i] = word


@_compiled
def _decode(
    codes: np.ndarray,
    stride: int,
    scales: np.ndarray,
    n: int,
    bits: int,
    block: int,
    add: bool,
    out: np.ndarray,
    out_stride: int,
) -> None:
    """Values of payloads, stored or added; rows are `stride` bytes of codes and `out_stride` words of `out` apart."""
    half = n if bits == 8 else (n + 1) // 2
    rows, blocks = scales.shape
    for row in range(rows):
        values = out[row * out_stride : row * out_stride + n]
        packed = codes[row * stride : row * stride + half]
        for b in range(blocks):
            start, stop = b * block, min(n, (b + 1) * block)
            low_stop, high_start = min(stop, half), max(start, half)
            scale = scales[row, b]
            if bits == 8:  # shifts are written as constants: by a variable they are made in 64 bits
                _decode_run(packed[start:stop], 24, 24, scale, add, values[start:stop])
                continue
            if start < low_stop:
                _decode_run(packed[start:low_stop], 28, 28, scale, add, values[start:low_stop])
            if high_start < stop:
                _decode_run(packed[high_start - half : stop - half], 24, 28, scale, add, values[high_start:stop])


def quantize(x: Tensor, bits: int, block: int) -> Tensor:
    """[rows, n] of a dtype in `FLOATS`, not empty, adjacent within a row, to uint8 [rows, payload_bytes(..)]."""
    rows, n = x.shape
    payload = torch.empty((rows, payload_bytes(n, bits, block)), dtype=torch.uint8, device="cpu")
    scales = np.empty((rows, -(-n // block)), np.float32)
    _encode(_words(x), x.stride(0), n, bits, block, _words(payload), payload.stride(0), scales)
    payload.numpy()[:, code_bytes(n, bits) :] = scales.view(np.uint8)
    return payload


def decode(payload: Tensor, out: Tensor, bits: int, block: int, add: bool) -> None:
    """Values of payloads of `quantize`, adjacent within a row, stored in `out` or added to it: [rows, n] of a dtype in
    `FLOATS`, not empty, adjacent within a row."""
    n = out.shape[1]
    scales = payload.numpy()[:, code_bytes(n, bits) :].copy().view(np.float32)
    _decode(_words(payload), payload.stride(0), scales, n, bits, block, add, _words(out), out.stride(0))


def warm_up() -> None:
    """Compile the CPU kernels, or load them from disk, into this process, and so into those it forks later.

    Takes seconds the first time on a machine, then half a second. Without it the first calls do so, in every rank.
    """
    for dtype in FLOATS:
        x = torch.ones(1, 1, dtype=dtype, device="cpu")
        decode(quantize(x, BITS[0], 1), x, BITS[0], 1, add=False)


def _words(x: Tensor) -> np.ndarray:
    """Memory of [rows, n], adjacent within a row, as a flat array of words."""
    flat = x.as_strided(((x.shape[0] - 1) * x.stride(0) + x.shape[1],), (1,))
    return (flat.view(_WORDS[x.dtype]) if x.dtype in _WORDS else flat).numpy()
