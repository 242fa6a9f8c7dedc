"""Linear layers in every layout, against torch's own."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.models.kernels.cpp import BuildError, CppKernels, PanelLinear
from repro.models.kernels.torch_kernels import Kernels, OneDNNLinear, PlainLinear

try:
    KERNELS = CppKernels()
except BuildError:
    KERNELS = None


MATRIX_UNITS = Path("/proc/cpuinfo").exists() and "amx_bf16" in Path("/proc/cpuinfo").read_text()
ONEDNN_BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
with_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


def panels(weight, bias, gelu):
    if KERNELS is None:
        pytest.skip("the kernels in C++ cannot be built here")
    layer = KERNELS.linear(weight, bias, gelu)
    if not isinstance(layer, PanelLinear) and MATRIX_UNITS and weight.dtype is torch.bfloat16:
        pytest.skip("this process may not use the processor's matrix units")
    assert isinstance(layer, PanelLinear)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [panels, pytest.param(OneDNNLinear, marks=with_onednn)], ids=["panels", "oneDNN"])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 41),
    width=st.sampled_from([2, 60, 512]),
    out=st.sampled_from([1, 31, 32, 33, 100, 515]),
    biased=st.booleans(),
    gelu=st.sampled_from([None, "none", "tanh"]),
)
def test_a_product_is_that_of_torch_and_a_row_is_what_it_is_alone(layer, dtype, rows, width, out, biased, gelu):
    """Bit for bit the latter, in the first row, the last, and with GELU where a vector instruction ends. oneDNN's in bf16
    by matrix units are not (37 rows of 512 to 515 outputs)."""
    if layer is OneDNNLinear and dtype is torch.bfloat16 and not ONEDNN_BF16:
        pytest.skip("oneDNN packs no bfloat16 on this processor")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(out, width, generator=generator).div_(width**0.5).to(dtype)
    bias = torch.randn(out, generator=generator).to(dtype) if biased else None
    x = torch.randn(rows, width, generator=generator).to(dtype)
    multiply = layer(weight, bias, gelu)
    y = multiply(x)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    exact = exact if gelu is None else F.gelu(exact, approximate=gelu)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), exact, **near)
    if layer is OneDNNLinear and dtype is torch.bfloat16 and MATRIX_UNITS:
        return
    assert all(torch.equal(multiply(x[i : i + 1])[0], y[i]) for i in range(rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ffn", [32, 50, 64, 352])  # some in whole panels
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 41), kernels=st.sampled_from([Kernels(), *([] if KERNELS is None else [KERNELS])]))
def test_a_gate_is_that_of_torch_and_a_row_is_what_it_is_alone(dtype, ffn, rows, kernels):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(2 * ffn, 60, generator=generator).div_(60**0.5).to(dtype)
    x = torch.randn(rows, 60, generator=generator).to(dtype)
    gated = kernels.gated(kernels.linear(weight))
    y = gated(x)
    gate, up = (x.double() @ weight.double().T).chunk(2, 1)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), F.silu(gate) * up, **near)
    if kernels is KERNELS:
        twice, none = kernels.linear(weight), kernels.linear(weight, None, "tanh")
        assert torch.equal(kernels.gated(twice)(x), y) and twice(x).shape == (rows, 2 * ffn)  # as it was
        assert torch.equal(kernels.gated(none)(x), kernels.silu_multiply(none(x)))
        assert all(torch.equal(gated(x[i : i + 1])[0], y[i]) for i in range(rows))


def test_many_rows_shared_by_threads():
    """More panels and tiles than one thread gets."""
    weight, x = torch.randn(3000, 256), torch.randn(150, 256)
    layer = panels(weight, None, None)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            results.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], x @ weight.T, atol=1e-3, rtol=1e-4)


@with_onednn
def test_inputs_that_fill_no_instruction_are_left_to_oneDNN():
    if KERNELS is None:
        pytest.skip("the kernels in C++ cannot be built here")
    if KERNELS.linear(torch.zeros(8, 8, dtype=torch.bfloat16)).panels.shape[-1] == 1:
        pytest.skip("no instruction of this processor takes two inputs")
    left = OneDNNLinear if ONEDNN_BF16 else PlainLinear
    assert isinstance(KERNELS.linear(torch.zeros(8, 7, dtype=torch.bfloat16)), left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_many_inputs_are_what_they_are_alone(dtype):
    """More bytes than a block of rows is to have: several blocks, with every kind of instruction."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, 20_000).div_(140).to(dtype), torch.randn(70, 20_000).to(dtype)
    layer = panels(weight, None, None)
    y = layer(x)
    torch.testing.assert_close(y.double(), x.double() @ weight.double().T, atol=1e-2, rtol=1e-2)
    assert all(torch.equal(layer(x[i : i + 1])[0], y[i]) for i in range(len(x)))


def test_what_does_not_fit_is_refused():
    layer = panels(torch.randn(40, 16), torch.randn(40), None)
    for x, named in (
        (torch.randn(3, 18), "does not fit"),
        (torch.randn(16), "does not fit"),
        (torch.randn(3, 16).bfloat16(), "one dtype"),
    ):
        with pytest.raises(RuntimeError, match=named):
            layer(x)
    with pytest.raises(RuntimeError, match="40 entries"):
        panels(torch.randn(40, 16), torch.randn(39), None)(torch.randn(2, 16))


@with_onednn
@pytest.mark.parametrize("gelu", [None, "tanh"])
def test_bfloat16_that_the_processor_does_not_pack_is_multiplied_as_it_lies(monkeypatch, gelu):
    """As without AVX-512, where torch refuses to pack it; fp32 is packed all the same."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight, bias, x = (torch.randn(shape).bfloat16() for shape in ((5, 8), (5,), (3, 8)))
    layer = Kernels().linear(weight, bias, gelu)
    assert isinstance(layer, PlainLinear) and isinstance(Kernels().linear(weight.float()), OneDNNLinear)
    exact = F.linear(x.double(), weight.double(), bias.double())
    exact = exact if gelu is None else F.gelu(exact, approximate=gelu)
    torch.testing.assert_close(layer(x).double(), exact, atol=3e-2, rtol=2e-2)
    assert layer(x[:0]).shape == (0, 5)


@with_onednn
def test_torch_takes_one_dnn_where_it_can():
    assert isinstance(Kernels().linear(torch.zeros(2, 2)), OneDNNLinear)
    assert isinstance(Kernels().linear(torch.zeros(2, 2, dtype=torch.float16)), PlainLinear)
    half = Kernels().linear(torch.ones(2, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64), "tanh")
    assert half.layout == "plain"
    expected = F.gelu(torch.full((1, 2), 4.0, dtype=torch.float64), approximate="tanh")
    torch.testing.assert_close(half(torch.ones(1, 3, dtype=torch.float64)), expected)
