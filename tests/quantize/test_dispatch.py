"""The public functions: which implementation runs for which tensor, and what they refuse."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from repro import quantize
from repro.quantize import cpu, reference


@pytest.fixture
def no_kernels(monkeypatch):
    """Kernels must not run."""
    for name in ("quantize", "decode"):
        monkeypatch.setattr(cpu, name, lambda *_: pytest.fail("a kernel ran"))


@pytest.fixture
def only_kernels(monkeypatch):
    """The reference must not run."""
    for name in ("quantize", "dequantize"):
        monkeypatch.setattr(reference, name, lambda *_: pytest.fail("the reference ran"))


@pytest.mark.parametrize("x", [torch.ones(9), torch.ones(2, 9).half(), torch.ones(9, 2).bfloat16().T, torch.ones(9, requires_grad=True)])  # fmt: skip
def test_kernels_run_on_the_cpu(only_kernels, x):
    payload = quantize.quantize(x, 4, 4)
    assert torch.equal(quantize.dequantize(payload, 9, 4, 4), torch.ones(x.shape))
    total = torch.ones(x.shape)
    quantize.accumulate(payload, total, 4, 4)
    assert torch.equal(total, torch.full(x.shape, 2.0))


def test_tensors_without_memory(no_kernels):
    """Fake tensors say that they are on the CPU; what plans memory with them must get shapes, not a crash."""
    with FakeTensorMode():
        x = torch.ones(3, 1000)
        payload = quantize.quantize(x, 4, 256)
        assert payload.shape == (3, 516) and payload.dtype == torch.uint8
        values = quantize.dequantize(payload, 1000, 4, 256, torch.bfloat16)
        assert values.shape == (3, 1000) and values.dtype == torch.bfloat16
        assert quantize.dequantize(payload, 1000, 4, 256, out=x) is x
        quantize.accumulate(payload, x, 4, 256)
    assert quantize.quantize(torch.ones(10, device="meta"), 8, 4).shape == (22,)


def test_whoever_follows_operators_sees_the_reference(no_kernels):
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += 1
            return function(*args, **(kwargs or {}))

    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    with Count() as count:
        eager = quantize.dequantize(quantize.quantize(x, 8, 16), 100, 8, 16)
    assert count.seen > 5
    traced = torch.compile(
        lambda x: quantize.dequantize(quantize.quantize(x, 8, 16), 100, 8, 16), backend="eager", fullgraph=True
    )
    assert torch.equal(traced(x), eager)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_nothing_to_do(shape):
    x = torch.ones(shape)
    payload = quantize.quantize(x, 8, 4)
    assert payload.shape == (*shape[:-1], quantize.payload_bytes(shape[-1], 8, 4))
    assert quantize.dequantize(payload, shape[-1], 8, 4).shape == shape
    quantize.accumulate(payload, x, 8, 4)


def test_results_in_any_memory():
    """`out` and `total` need not be adjacent."""
    x = torch.arange(1.0, 7.0).view(2, 3)
    payload = quantize.quantize(x, 8, 1)
    for place in (torch.zeros(2, 3), torch.zeros(3, 2).T, torch.zeros(2, 8)[:, ::2][:, :3], torch.zeros(2, 9)[:, 4:7]):
        assert quantize.dequantize(payload, 3, 8, 1, out=place) is place
        torch.testing.assert_close(place, x)
        quantize.accumulate(payload, place, 8, 1)
        torch.testing.assert_close(place, 2 * x)
    with pytest.raises(RuntimeError, match="single memory location"):
        quantize.accumulate(payload, torch.zeros(1, 3).expand(2, 3), 8, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_out_says_the_dtype(dtype):
    x = torch.randn(100, generator=torch.Generator().manual_seed(1))
    payload = quantize.quantize(x, 8, 16)
    out = torch.empty(100, dtype=dtype)
    assert torch.equal(
        quantize.dequantize(payload, 100, 8, 16, out=out), quantize.dequantize(payload, 100, 8, 16, dtype)
    )


def test_autograd_knows_what_was_written():
    """Kernels write behind autograd's back; a value that it kept for a gradient must not change unnoticed."""
    payload = quantize.quantize(torch.ones(4), 8, 4)
    for write in (
        lambda t: quantize.accumulate(payload, t, 8, 4),
        lambda t: quantize.dequantize(payload, 4, 8, 4, out=t),
    ):
        x, kept = torch.ones(4, requires_grad=True), torch.ones(4)
        loss = (x * kept).sum()
        write(kept)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        quantize.accumulate(payload, torch.ones(4, requires_grad=True), 8, 4)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="bits is 3, allowed: 8, 4"):
        quantize.quantize(torch.ones(4), 3, 4)
    with pytest.raises(ValueError, match="block is 0"):
        quantize.quantize(torch.ones(4), 8, 0)
    with pytest.raises(ValueError, match=r"floating-point tensor \[n\] or \[rows, n\], found torch.int64"):
        quantize.quantize(torch.ones(4, dtype=torch.int64), 8, 4)
    payload = quantize.quantize(torch.ones(4), 8, 4)
    with pytest.raises(ValueError, match=r"payload of 8 bytes, but 5 values in INT8 with blocks of 4 take 13"):
        quantize.dequantize(payload, 5, 8, 4)
    with pytest.raises(ValueError, match=r"payload is torch.float32, not uint8"):
        quantize.dequantize(payload.float(), 4, 8, 4)
    with pytest.raises(ValueError, match=r"out is \(5,\), but the payload holds \(4,\)"):
        quantize.dequantize(payload, 4, 8, 4, out=torch.ones(5))
    with pytest.raises(ValueError, match=r"payload of 8 bytes, but 5 values"):
        quantize.accumulate(payload, torch.ones(5), 8, 4)
    for total in (torch.ones(4).double(), torch.ones(1, 4)):
        with pytest.raises(ValueError, match=r"total is .* needs fp32 rows alike"):
            quantize.accumulate(payload, total, 8, 4)
