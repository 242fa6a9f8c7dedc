"""The kernels in C++ against those in torch, and what happens where they cannot be built."""

import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_inputs import full_cache, rows

from repro.models.kernels import choose
from repro.models.kernels.cpp import BuildError, CppKernels
from repro.models.kernels.torch_kernels import Kernels
from repro.models.kv_cache import CacheSizes, KVCache
from repro.models.rows import Rows

try:
    CppKernels()
except BuildError as error:
    pytest.skip(str(error), allow_module_level=True)
CPU = torch.device("cpu")
CAPACITY = 90


@settings(max_examples=80, deadline=None)
@given(
    decoding=st.lists(st.integers(0, CAPACITY - 1), max_size=3),
    prompts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (4, 4), (6, 2)]),
    dim=st.sampled_from([2, 10, 64, 128, 256]),
    share=st.sampled_from([0.5, 1.0]),
    paged=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_attention_in_cpp_is_attention_in_torch(decoding, prompts, heads, dim, share, paged, dtype, seed):
    heads, kv_heads = heads
    asked, pairs = rows(decoding, prompts, first=1), max(1, int(dim * share) // 2)
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(len(asked.tokens), (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    angles = torch.rand(len(asked.tokens), pairs, generator=generator) * 6
    results = []
    for kernels in (CppKernels(), Kernels()):
        cache = full_cache(CacheSizes(2, kv_heads, dim, dtype), CAPACITY, paged)
        attend = kernels.attention(asked, angles.cos(), angles.sin(), cache)
        results.append((attend(1, qkv.clone()), cache.keys, cache.values))
    near = {"atol": 1e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 0.04, "rtol": 0.02}
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, **near)


@settings(max_examples=30, deadline=None)
@given(
    positions=st.lists(st.integers(0, CAPACITY - 1), min_size=2, max_size=5),
    dim=st.sampled_from([10, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_is_bit_for_bit_what_it_is_alone(positions, dim, dtype):
    """Attention of rows that decode."""
    kernels, sizes = CppKernels(), CacheSizes(2, 2, dim, dtype)
    qkv = torch.randn(len(positions), 8 * dim, generator=torch.Generator().manual_seed(2)).to(dtype)
    angles = torch.rand(len(positions), dim // 2)
    together = full_cache(sizes, CAPACITY, False)
    out = kernels.attention(rows(positions, []), angles.cos(), angles.sin(), together)(0, qkv)
    for i, position in enumerate(positions):
        alone, row = full_cache(sizes, CAPACITY, False), rows([position], [], first=i)
        mine = kernels.attention(row, angles[i : i + 1].cos(), angles[i : i + 1].sin(), alone)(0, qkv[i : i + 1])
        assert torch.equal(mine[0], out[i])


def attended(kernels, cache, asked, qkv, angles, wanted=slice(None)):
    """Of the last layer."""
    return kernels.attention(asked, angles.cos(), angles.sin(), cache, wanted)(1, qkv)


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.sets(st.integers(1, 199), max_size=4),
    length=st.integers(1, 200),
    heads=st.sampled_from([(1, 1), (6, 2), (3, 1), (33, 1), (64, 1)]),  # more than a panel of queries a row
    dim=st.sampled_from([2, 5, 33, 64, 80]),
    block=st.sampled_from([0, 1, 8, 48, 64, 128]),  # 0: not paged; of 48 a block of keys lies in two
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@example({64, 127, 128, 199}, 200, (6, 2), 64, 8, torch.bfloat16)  # ends in a chunk of a single token
def test_a_prompt_in_chunks_is_bit_for_bit_the_prompt(cuts, length, heads, dim, block, dtype):
    """Beside rows that decode and another prompt, and when a row is the only one wanted. Nothing of what an earlier
    request left in the slot is read: it is NaN."""
    kernels, (heads, kv_heads) = CppKernels(), heads
    sizes, generator = CacheSizes(2, kv_heads, dim, dtype), torch.Generator().manual_seed(length)
    qkv = torch.randn(length + 21, (heads + 2 * kv_heads) * dim, generator=generator).to(dtype)
    angles = torch.rand(length + 21, max(1, dim // 4), generator=generator)
    whole, cut = (full_cache(sizes, 200, bool(block), block) for _ in range(2))
    for cache in (whole, cut):
        for part in (cache.keys, cache.values):
            part[:, cache.table[0] if block else 0] = float("nan")
    edges = sorted({0, length} | {edge for edge in cuts if edge < length})
    out = attended(kernels, whole, rows([], [(0, length)]), qkv[:length], angles[:length])
    for start, end in pairwise(edges):
        chunk = [*range(start, end), *range(length, length + 21)]
        beside = Rows.joined([rows([], [(start, end - start)]), rows([30], [(5, 20)], first=1)])
        found = attended(kernels, cut, beside, qkv[chunk], angles[chunk])
        assert torch.equal(found[: end - start], out[start:end])
        last = torch.tensor([end - start - 1])
        assert torch.equal(attended(kernels, cut, beside, qkv[chunk], angles[chunk], last)[0], out[end - 1])
    assert out.isfinite().all()


def test_a_prompt_of_many_parts_is_shared_by_threads():
    cache, angles = full_cache(CacheSizes(2, 2, 64), 700, False), torch.rand(700, 32)
    qkv, before, results = torch.randn(700, 8 * 64), torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            results.append(attended(CppKernels(), cache, rows([], [(0, 700)]), qkv, angles))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], attended(Kernels(), cache, rows([], [(0, 700)]), qkv, angles))


FORKED = """
import os, threading, torch
from repro.models.kernels.cpp import CppKernels
torch.set_num_threads(3)
add, x = CppKernels().silu_multiply, torch.randn(3000, 200)
right = add(x)
def same(): assert all(torch.equal(add(x), right) for _ in range(200))
callers = [threading.Thread(target=same) for _ in range(3)]
for caller in callers: caller.start()
for caller in callers: caller.join()
if (child := os.fork()) == 0:
    same()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_several_threads_and_forked_processes_may_call():
    assert subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=100).stdout == "7\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_small_steps(dtype):
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(5, 200, generator=generator).to(dtype) for _ in range(2))
    weight, ours, theirs = torch.rand(200, generator=generator).to(dtype), CppKernels(), Kernels()
    for branch in (None, y):
        a, b = x.clone(), x.clone()
        torch.testing.assert_close(ours.add_norm(a, branch, weight, 1e-5), theirs.add_norm(b, branch, weight, 1e-5))
        assert torch.equal(a, b)
    index = torch.tensor([4, 0, 0, 3])
    assert torch.equal(ours.take(x, index), x[index])
    torch.testing.assert_close(
        ours.silu_multiply(x), theirs.silu_multiply(x), atol=1e-2 if dtype is torch.bfloat16 else 1e-6, rtol=1e-2
    )
    assert torch.equal(ours.argmax(x), x.argmax(-1)) and torch.equal(ours.argmax(x[:, 20:]), x[:, 20:].argmax(-1))
    with pytest.raises(RuntimeError, match="contiguous"):
        ours.silu_multiply(x[:, 20:])
    assert ours.argmax(torch.tensor([[1.0, 3.0, 3.0], [-9.0, -9.0, -9.0]])).tolist() == [1, 0]


def test_a_head_that_is_too_wide_is_refused():
    cache = KVCache(CacheSizes(2, 1, 258), 6, CAPACITY)
    attend = CppKernels().attention(rows([3], []), torch.ones(1, 2), torch.ones(1, 2), cache)
    with pytest.raises(RuntimeError, match="head_dim is 258, at most 256"):
        attend(0, torch.ones(1, 3 * 258))


def built_elsewhere(tmp_path, compiler, code):
    """Runs code where nothing was built yet, with this compiler."""
    environment = {"CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


CHOOSE = (
    "import torch; from repro.models.kernels import choose; "
    "print(choose('{}', torch.device('cpu'), torch.float32, 64).name)"
)


def test_a_compiler_that_fails_is_named_and_auto_goes_on_in_torch(tmp_path):
    refused = tmp_path / "refused"
    refused.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    refused.chmod(0o755)
    run = built_elsewhere(tmp_path, refused, CHOOSE.format("auto"))
    assert run.stdout == "torch\n" and "no such flag" in run.stderr and "kernels in torch" in run.stderr
    run = built_elsewhere(tmp_path, refused, CHOOSE.format("cpp"))
    assert run.returncode == 1 and "BuildError" in run.stderr and "no such flag" in run.stderr
    run = built_elsewhere(tmp_path, tmp_path / "missing", CHOOSE.format("cpp"))
    assert run.returncode == 1 and "BuildError" in run.stderr and "missing" in run.stderr
    assert not list(tmp_path.glob("*.so"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    run = built_elsewhere(tmp_path / "file", "g++", CHOOSE.format("auto"))
    assert run.stdout == "torch\n" and "file" in run.stderr


def test_what_cannot_be_in_cpp():
    assert choose("auto", CPU, torch.float16, 64).name == "torch"
    assert choose("auto", torch.device("meta"), torch.float32, 64).name == "torch"
    assert choose("auto", CPU, torch.float32, 512).name == "torch"
    for device, dtype, dim in (
        (torch.device("meta"), torch.float32, 64),
        (CPU, torch.float16, 64),
        (CPU, torch.float32, 258),
    ):
        with pytest.raises(
            ValueError, match=f"dtype {dtype}, device {device}, head_dim {dim}; allowed: 'cpp' for float32"
        ):
            choose("cpp", device, dtype, dim)


@pytest.mark.parametrize(("dtype", "widest"), [(torch.float32, 256), (torch.bfloat16, 512), (torch.float16, 512)])
def test_what_cannot_be_in_triton(monkeypatch, dtype, widest):
    """Heads so wide that a tile of prompts would have fewer positions than matrix units multiply."""
    monkeypatch.setattr("repro.models.kernels._triton", lambda device: device)
    device = torch.device("cuda")
    assert choose("auto", device, dtype, widest) is choose("triton", device, dtype, widest) is device
    assert choose("auto", device, dtype, widest + 2).name == "torch"
    with pytest.raises(ValueError, match=f"head_dim {widest + 2}; allowed: .*heads up to 256 in float32 and 512"):
        choose("triton", device, dtype, widest + 2)


def test_what_is_neither_kernels_nor_a_dtype():
    with pytest.raises(ValueError, match=r"kernels is 'cuda', dtype torch\.float32, device cpu.*allowed: 'cpp' for"):
        choose("cuda", CPU, torch.float32, 64)
    for dtype in ("bfloat16", torch.int32):
        with pytest.raises(ValueError, match=f"dtype is {dtype!r}, allowed: torch.float32, torch.bfloat16"):
            choose("auto", CPU, dtype, 64)


def test_triton_is_tried_on_the_device_of_the_model(monkeypatch):
    """Not on the current one, which cannot read the other's memory."""
    current, tried = [], []

    class OnDevice:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *_):
            current.pop()

    class Stub:
        def silu_multiply(self, x):
            tried.append(list(current))

    zeros, device = torch.zeros, torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    monkeypatch.setitem(sys.modules, "repro.models.kernels.triton_kernels", SimpleNamespace(TritonKernels=Stub))
    assert isinstance(choose("triton", device, torch.float32, 64), Stub)
    assert tried == [[device]]


def test_loading_leaves_the_arithmetic_of_the_process_alone():
    """Older GCCs link a start-up routine with -ffast-math that flushes subnormal numbers."""
    code = CHOOSE.format("cpp") + "; print((torch.full((1,), 1e-20) * 1e-20).item() > 0, 1e-300 * 1e-10 > 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "C++\nTrue True\n"
