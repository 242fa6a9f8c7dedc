"""The kernels in Triton against those in torch: on a GPU, or in Triton's interpreter
(`tests/gpu/test_triton_models.py`)."""

import importlib.util
import os

import pytest
import torch
from kernel_inputs import decode, full_cache, rows

from repro.models.kernels.torch_kernels import Kernels
from repro.models.kv_cache import CacheSizes
from repro.models.llama import Llama, LlamaConfig

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or (TRITON and torch.cuda.is_available())):
    pytest.skip("needs a GPU; tests/gpu/test_triton_models.py runs it in Triton's interpreter", allow_module_level=True)

DEVICE = "cpu" if INTERPRETED else "cuda"
CAPACITY = 700  # more than two splits
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


if INTERPRETED:
    # Triton's interpreter keeps bf16 as 16-bit integers, and its matrix product would multiply those.
    from triton import language as tl
    from triton.runtime import interpreter

    _product = interpreter.interpreter_builder.create_dot

    def _in_fp32(x):
        return interpreter.interpreter_builder.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    interpreter.interpreter_builder.create_dot = lambda a, b, *rest: _product(_in_fp32(a), _in_fp32(b), *rest)


def triton_kernels():
    from repro.models.kernels.triton_kernels import TritonKernels

    return TritonKernels()


def near(dtype):
    return {"atol": 1e-4, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.05, "rtol": 0.03}


SHAPES = [(4, 4, 64, 32), (6, 2, 80, 16), (4, 2, 11, 4), (1, 1, 128, 64)]  # heads, KV heads, width of a head, pairs
CASES = [
    (*shape, paged, dtype)
    for index, shape in enumerate(SHAPES)
    for paged in (False, True)
    for dtype in DTYPES
    # The interpreter takes seconds for each: of two bytes every other shape is paged there.
    if DEVICE != "cpu" or dtype is torch.float32 or paged == bool(index % 2)
]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "pairs", "paged", "dtype"), CASES)
def test_attention(heads, kv_heads, dim, pairs, paged, dtype):
    compare_attention(heads, kv_heads, dim, pairs, paged, dtype)


def test_attention_of_so_many_positions_that_a_program_takes_more(monkeypatch):
    from repro.models.kernels import triton_kernels as module

    monkeypatch.setattr(module, "_SPLITS", 2)
    compare_attention(6, 2, 80, 16, False, torch.float32)


def compare_attention(heads, kv_heads, dim, pairs, paged, dtype):
    """Short, at the edges of blocks and splits, and long; beside prompts; heads of which a part turns."""
    asked = rows([0, 127, 128, 699], [(0, 3), (40, 90)], device=DEVICE)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(len(asked.tokens), (heads + 2 * kv_heads) * dim, generator=generator).to(DEVICE, dtype)
    angles = (torch.rand(len(asked.tokens), pairs, generator=generator) * 6).to(DEVICE)
    results = []
    for kernels in (triton_kernels(), Kernels()):
        cache = full_cache(CacheSizes(2, kv_heads, dim, dtype, DEVICE), CAPACITY, paged, block=16)
        attend = kernels.attention(asked, angles.cos(), angles.sin(), cache)
        results.append((attend(1, qkv.clone()), cache.keys, cache.values))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **near(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 200, 1500])
def test_the_small_steps(dtype, width):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(5, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = torch.rand(width, generator=generator).to(DEVICE, dtype)
    ours, theirs = triton_kernels(), Kernels()
    for branch in (None, y):
        a, b = x.clone(), x.clone()
        torch.testing.assert_close(
            ours.add_norm(a, branch, weight, 1e-5), theirs.add_norm(b, branch, weight, 1e-5), **near(dtype)
        )
        torch.testing.assert_close(a, b, **near(dtype))
    torch.testing.assert_close(ours.silu_multiply(x), theirs.silu_multiply(x), **near(dtype))


@pytest.mark.parametrize("paged", [False, True])
def test_a_model_decodes_as_in_torch(paged):
    config = LlamaConfig(layers=2, width=64, heads=4, kv_heads=2, ffn=96, vocab=61, context=400)
    models = [Llama.random(config, device=DEVICE, kernels="torch") for _ in range(2)]
    models[0].kernels = triton_kernels()
    logits = []
    for model in models:
        cache = model.new_paged_cache(3, 300, 60, 16) if paged else model.new_cache(3, 300)
        if paged:
            for slot in range(3):
                cache.reserve(slot, 300)
        for slot, length in enumerate((5, 60, 1)):
            model.prefill(torch.arange(length, device=DEVICE) % 61, cache, slot)
        lengths = torch.tensor([5, 60, 1], device=DEVICE)
        steps = []
        for _ in range(3):
            steps.append(decode(model, torch.tensor([7, 8, 9], device=DEVICE), lengths, cache, slice(0, 3), 63))
            lengths = lengths + 1
        logits.append(torch.stack(steps))
    torch.testing.assert_close(*logits, **near(torch.float32))
