"""Kernels give the bytes of the reference for every input, and touch nothing else: numba's on the CPU, Triton's on a
GPU.

`tests/gpu/test_triton_quantize.py` runs the Triton half of this file in Triton's interpreter where there is no GPU.
"""

import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from repro import quantize
from repro.quantize import BITS, cpu, reference

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"

FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-45, -1e-38, 3.4e38]
bits_ = st.sampled_from(BITS)
blocks = st.sampled_from([1, 2, 7, 64, 256, 2**20]) | st.integers(1, 600)
floats = st.sampled_from(FLOATS)
EXAMPLES = int(os.environ.get("REPRO_EXAMPLES", 150 if TRITON else 300))  # Triton interprets slowly, or compiles
examples = settings(max_examples=EXAMPLES, deadline=None)


@dataclass(frozen=True)
class Kernels:
    """A module of kernels and the device of its tensors; takes and gives tensors of any dtype on the CPU."""

    module: ModuleType
    device: str

    def quantize(self, x: Tensor, bits: int, block: int) -> Tensor:
        dtype = x.dtype if x.dtype in self.module.FLOATS else torch.float32
        rows = torch.atleast_2d(x.to(self.device, dtype))
        return self.module.quantize(rows, bits, block).view(*x.shape[:-1], -1).cpu()

    def dequantize(self, payload: Tensor, n: int, bits: int, block: int, dtype: torch.dtype) -> Tensor:
        written = dtype if dtype in self.module.FLOATS else torch.float32
        out = torch.empty(*payload.shape[:-1], n, dtype=written, device=self.device)
        self.module.decode(torch.atleast_2d(payload.to(self.device)), torch.atleast_2d(out), bits, block, add=False)
        return out.cpu().to(dtype)

    def accumulate(self, payload: Tensor, total: Tensor, bits: int, block: int) -> Tensor:
        total = total.to(self.device, copy=True)
        self.module.decode(torch.atleast_2d(payload.to(self.device)), torch.atleast_2d(total), bits, block, add=True)
        return total.cpu()


USABLE = TRITON and (INTERPRETED or torch.cuda.is_available())


@pytest.fixture(scope="module", params=["cpu", *([pytest.param("triton", marks=pytest.mark.gpu)] if USABLE else [])])
def kernels(request) -> Kernels:
    if request.param == "cpu":
        return Kernels(cpu, "cpu")
    from repro.quantize import triton_kernels

    return Kernels(triton_kernels, "cuda" if torch.cuda.is_available() else "cpu")


@st.composite
def tensors(draw, dtypes=FLOATS) -> Tensor:
    """[n] or [rows, n] of: any bits, numbers below the normal ones, halves (ties of rounding), or wide spread; some
    special."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    shape = draw(st.tuples(st.integers(1, 700)) | st.tuples(st.integers(1, 4), st.integers(1, 300)))
    x = {
        "bits": lambda: random.integers(0, 2**32, shape, np.uint32).view(np.float32),
        "subnormal": lambda: random.integers(0, 2**24, shape, np.uint32).view(np.float32),
        "halves": lambda: (random.integers(-254, 255, shape) / 2).astype(np.float32),
        "wide": lambda: (random.normal(size=shape) * 10.0 ** random.integers(-44, 38, shape)).astype(np.float32),
    }[draw(st.sampled_from(["bits", "subnormal", "halves", "wide"]))]()
    for value in draw(st.lists(st.sampled_from(SPECIAL), max_size=3)):
        x.reshape(-1)[random.integers(x.size)] = value
    return torch.from_numpy(x).to(draw(st.sampled_from(dtypes)))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, zeros with their signs, except that any NaN equals any other."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    broken = a.isnan()
    numbers = [x.masked_fill(broken, 0.0).view(words) for x in (a, b)]
    return a.dtype == b.dtype and torch.equal(broken, b.isnan()) and torch.equal(*numbers)


@examples
@given(x=tensors(), bits=bits_, block=blocks)
def test_quantise(kernels, x, bits, block):
    assert torch.equal(kernels.quantize(x, bits, block), reference.quantize(x, bits, block))


@examples
@given(x=tensors(), bits=bits_, block=blocks, dtype=floats)
def test_dequantise(kernels, x, bits, block, dtype):
    payload, n = reference.quantize(x, bits, block), x.shape[-1]
    assert same(
        kernels.dequantize(payload, n, bits, block, dtype), reference.dequantize(payload, n, bits, block, dtype)
    )


@examples
@given(n=st.integers(1, 700), bits=bits_, block=blocks, dtype=floats, whole=st.booleans(), seed=st.integers(0, 2**31))
def test_dequantise_any_bytes(kernels, n, bits, block, dtype, whole, seed):
    """Not only what `quantize` writes: every code and every scale, or scales of whole numbers, for ties of 16-bit
    rounding."""
    random = np.random.default_rng(seed)
    payload = random.integers(0, 256, reference.payload_bytes(n, bits, block), np.uint8)
    if whole:
        scales = payload[reference.code_bytes(n, bits) :]
        scales[:] = random.integers(-16, 17, scales.size // 4).astype(np.float32).view(np.uint8)
    payload = torch.from_numpy(payload)
    assert same(
        kernels.dequantize(payload, n, bits, block, dtype), reference.dequantize(payload, n, bits, block, dtype)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 256])
def test_every_16_bit_value(kernels, dtype, block):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert torch.equal(kernels.quantize(x, 8, block), reference.quantize(x, 8, block))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_infinities_and_nans(kernels, bits, dtype):
    """NaNs of both signs and with all their bits set, in values and in scales: rounding must not carry out of them."""
    nans = torch.tensor([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], dtype=torch.uint32)
    x = torch.ones(7, 6)
    x[:, 2] = torch.cat((nans.view(torch.float32), torch.tensor([torch.inf, -torch.inf])))
    payload = kernels.quantize(x.to(dtype), bits, 3)
    assert torch.equal(payload, reference.quantize(x.to(dtype), bits, 3))
    payload[:, -4:] = x[:, 2:3].contiguous().view(torch.uint8)
    assert same(kernels.dequantize(payload, 6, bits, 3, dtype), reference.dequantize(payload, 6, bits, 3, dtype))


@examples
@given(x=tensors(), total=tensors([torch.float32]), bits=bits_, block=blocks)
def test_accumulate(kernels, x, total, bits, block):
    """A product and a sum are two roundings; fused they would be one."""
    n = min(x.numel(), total.numel())
    expected, payload = total.view(-1)[:n].clone(), reference.quantize(x.view(-1)[:n], bits, block)
    expected += reference.dequantize(payload, n, bits, block)
    assert same(kernels.accumulate(payload, total.view(-1)[:n], bits, block), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    "n, block", [(40_000, 16_384), (40_000, 10_000), (40_001, 16_385), (50_000, 2**30), (66_003, 1)]
)
def test_long_blocks(kernels, n, block, bits):
    """The middle of the tensor lies at the end of a block or within it; blocks of more values than a program holds."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    payload = kernels.quantize(x, bits, block)
    assert torch.equal(payload, reference.quantize(x, bits, block))
    assert same(
        kernels.dequantize(payload, n, bits, block, x.dtype), reference.dequantize(payload, n, bits, block, x.dtype)
    )


@pytest.mark.parametrize("dtype", FLOATS[:3])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [4096, 8200, 30_003])
def test_many_blocks(kernels, n, bits, dtype):
    """Long enough for unrolled loops and several programs, at offsets that suit wide loads and at others."""
    x = torch.randn(2, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    payload = kernels.quantize(x, bits, 256)
    assert torch.equal(payload, reference.quantize(x, bits, 256))
    assert same(kernels.dequantize(payload, n, bits, 256, dtype), reference.dequantize(payload, n, bits, 256, dtype))


@pytest.mark.parametrize("dtype", FLOATS[:2])
@pytest.mark.parametrize("bits", BITS)
def test_rows_of_larger_tensors(kernels, bits, dtype):
    """Rows lie apart, and nothing is written between them."""
    module, n, size = kernels.module, 101, reference.payload_bytes(101, bits, 16)
    x = torch.randn(3, 2 * n, generator=torch.Generator().manual_seed(2)).to(kernels.device, dtype)[:, 5 : 5 + n]
    payload = torch.full((3, size + 9), 77, dtype=torch.uint8, device=kernels.device)[:, 2 : 2 + size]
    payload.copy_(module.quantize(x, bits, 16))
    assert torch.equal(payload.cpu(), reference.quantize(x.cpu(), bits, 16))
    assert torch.equal(module.quantize(x[:1].expand(3, n), bits, 16), payload[:1].expand(3, size))  # rows at one place

    def around(room: Tensor) -> Tensor:
        return torch.cat((room[:, :3], room[:, 3 + n :]), dim=1)

    room = torch.full((3, n + 7), 42.0, dtype=dtype, device=kernels.device)
    module.decode(payload, room[:, 3 : 3 + n], bits, 16, add=False)
    assert torch.equal(room[:, 3 : 3 + n].cpu(), reference.dequantize(payload.cpu(), n, bits, 16, dtype))
    assert (around(room) == 42).all()
    room = torch.full((3, n + 7), 42.0, device=kernels.device)
    module.decode(payload, room[:, 3 : 3 + n], bits, 16, add=True)
    assert torch.equal(room[:, 3 : 3 + n].cpu(), 42.0 + reference.dequantize(payload.cpu(), n, bits, 16))
    assert (around(room) == 42).all()


def test_forked_processes_compile_nothing():
    """numba's: a kernel that compiles itself again for some layout would do so in every rank."""
    cpu.warm_up()
    before = [list(kernel.signatures) for kernel in (cpu._encode, cpu._decode)]
    assert [len(signatures) for signatures in before] == [2, 2]
    for bits in BITS:
        for x in (torch.ones(5), torch.ones(3, 7).bfloat16(), torch.ones(4, 9)[:, 1:6], torch.ones(2, 3).half()):
            payload = quantize.quantize(x, bits, 2)
            quantize.dequantize(payload, x.shape[-1], bits, 2, x.dtype)
            quantize.accumulate(payload, x.float(), bits, 2)
    assert [list(kernel.signatures) for kernel in (cpu._encode, cpu._decode)] == before

    reading, writing = os.pipe()
    x = torch.arange(1000.0)
    if (child := os.fork()) == 0:
        try:
            os.write(writing, cpu.quantize(x[None], 8, 64).numpy().tobytes())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 4096) == reference.quantize(x, 8, 64).numpy().tobytes()
