"""The definition of blockwise quantisation: the error bound, the bytes, and that nothing goes wrong silently."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.quantize.reference import code_bytes, dequantize, payload_bytes, quantize

BITS = st.sampled_from([8, 4])
BLOCKS = st.sampled_from([1, 2, 7, 64, 256])


def error_bound(x: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Largest |x - dequantize(quantize(x))| per value of a flat tensor, fp32: half a step of its block (and a little for
    the fp32 rounding of x / scale). Decoding to a 16-bit dtype rounds once more, in that dtype."""
    scales = quantize(x, bits, block)[code_bytes(x.numel(), bits) :].clone().view(torch.float32)
    return (scales * (0.5 + 2e-5)).repeat_interleave(min(block, x.numel()))[: x.numel()]


@st.composite
def tensors(draw) -> torch.Tensor:
    """Flat tensors over many magnitudes, with zeros and outliers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(draw(st.integers(0, 700)), generator=generator)
    x *= 10.0 ** torch.randint(-30, 30, x.shape, generator=generator) if draw(st.booleans()) else draw(st.floats(-3, 3))
    return x * (torch.rand(x.shape, generator=generator) < 0.9)


@settings(max_examples=150, deadline=None)
@given(tensors(), BITS, BLOCKS)
def test_error_is_within_half_a_step_of_the_block(x, bits, block):
    payload = quantize(x, bits, block)
    assert payload.dtype == torch.uint8 and payload.numel() == payload_bytes(x.numel(), bits, block)
    back = dequantize(payload, x.numel(), bits, block)
    assert ((x - back).abs() <= error_bound(x, bits, block)).all()


@settings(max_examples=50, deadline=None)
@given(tensors(), BITS, BLOCKS)
def test_the_bound_is_half_of_what_a_code_is_worth(x, bits, block):
    """The bound itself must follow from the data: absmax of the block over 127 or 7, halved."""
    bound = error_bound(x, bits, block)
    for start in range(0, x.numel(), block):
        part = slice(start, start + block)
        half = x[part].abs().max() / {8: 127, 4: 7}[bits] / 2
        assert (bound[part] <= half * 1.001 + 1e-38).all()


@settings(max_examples=50, deadline=None)
@given(tensors(), BITS, BLOCKS)
def test_quantised_values_stay_where_they_are(x, bits, block):
    once = dequantize(quantize(x, bits, block), x.numel(), bits, block)
    twice = dequantize(quantize(once, bits, block), x.numel(), bits, block)
    torch.testing.assert_close(twice, once, rtol=1e-5, atol=0)


def test_int4_layout_is_first_half_low_second_half_high():
    x = torch.tensor([1.0, -2.0, 3.0, 7.0, -7.0, 0.0])
    payload = quantize(x, 4, 8)
    assert payload[:3].tolist() == [0x71, 0x9E, 0x03]  # 7|1, -7|-2, 0|3 in two's complement nibbles
    assert payload[3:].clone().view(torch.float32).tolist() == [1.0]
    assert dequantize(payload, 6, 4, 8).tolist() == x.tolist()


def test_int8_layout_is_codes_then_one_scale_per_block():
    payload = quantize(torch.tensor([127.0, -1.0, 0.5, -0.5]), 8, 2)
    assert payload[:4].view(torch.int8).tolist() == [127, -1, 127, -127]
    scales = payload[4:].clone().view(torch.float32)
    torch.testing.assert_close(scales, torch.tensor([1.0, 0.5 / 127]))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [1, 5, 256, 1001])
def test_rows_are_quantised_like_flat_tensors(bits, numel):
    x = torch.randn(3, numel, generator=torch.Generator().manual_seed(0))
    rows = quantize(x, bits, 64)
    assert torch.equal(rows, torch.stack([quantize(row, bits, 64) for row in x]))
    assert torch.equal(
        dequantize(rows, numel, bits, 64), torch.stack([dequantize(row, numel, bits, 64) for row in rows])
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_other_dtypes_add_only_their_own_rounding(dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    back = dequantize(quantize(x, 8, 100), 1000, 8, 100, dtype)
    assert back.dtype == dtype
    allowed = error_bound(x, 8, 100) + x.float().abs() * torch.finfo(dtype).eps
    assert ((x.float() - back.float()).abs() <= allowed).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_overflow_stays_visible(bad):
    x = torch.ones(8)
    x[1] = bad
    back = dequantize(quantize(x, 4, 4), 8, 4, 4)
    assert back[:4].isnan().all() and torch.equal(back[4:], torch.ones(4))


def test_smaller_blocks_follow_outliers_better():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    x[::512] *= 100
    errors = [(x - dequantize(quantize(x, 4, block), 4096, 4, block)).abs().mean() for block in (64, 512, 4096)]
    assert errors[0] < errors[1] < errors[2] * 1.01


@pytest.mark.parametrize("bits", [8, 4])
def test_bytes_are_defined_beside_infinities_and_nans(bits):
    """Whatever the sign and the payload of a NaN, and whatever integer the processor makes of one: codes of 0 and one
    NaN."""
    nans = torch.tensor([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], dtype=torch.uint32).view(torch.float32)
    for bad, scale in [(bad, 0x7FC00000) for bad in nans] + [(torch.tensor(-torch.inf), 0x7F800000)]:
        x = torch.tensor([1.0, -2.0, 3.0, 4.0])
        x[2] = bad
        payload = quantize(x, bits, 4)
        assert not payload[:-4].any() and payload[-4:].clone().view(torch.uint32).item() == scale


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_longer_than_the_tensor_is_one_block(bits):
    x = torch.randn(10, generator=torch.Generator().manual_seed(3))
    assert torch.equal(quantize(x, bits, 2**40), quantize(x, bits, 10))
    assert torch.equal(error_bound(x, bits, 2**40), error_bound(x, bits, 10))
