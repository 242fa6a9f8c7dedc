"""The quantisers in Triton where there is no GPU: run in Triton's interpreter, and compiled for an NVIDIA and an AMD GPU.

Both need Triton, which torch brings along for GPUs only; without one it comes from `.triton/` (`make triton`) and is seen
by processes of their own: with Triton in the environment itself, torch.compile would use it. On a GPU the kernels are
tested by `tests/quantize/test_kernels.py`, as they are in the interpreter.
"""

import re
from pathlib import Path

import pytest
import torch
from triton_folder import TRITON, pytest_with_triton, with_folder

from repro import quantize
from repro.quantize import reference


@with_folder
@pytest.mark.parametrize("examples", [20, pytest.param(60, marks=pytest.mark.exhaustive)])
def test_bytes_in_the_interpreter(tmp_path, examples):
    file = Path(__file__).parents[1] / "quantize" / "test_kernels.py"
    pytest_with_triton(file, "triton", tmp_path, TRITON_INTERPRET="1", REPRO_EXAMPLES=str(examples))


@pytest.mark.slow
@with_folder
def test_compiles_without_a_gpu(tmp_path):
    pytest_with_triton(Path(__file__), "test_code_for", tmp_path, TRITON_INTERPRET="0")


@pytest.mark.skipif(not TRITON, reason="test_compiles_without_a_gpu runs it")
@pytest.mark.parametrize("target", ["cuda:90:32", "hip:gfx90a:64"])
@pytest.mark.parametrize("int4", [False, True])
def test_code_for(target, int4):
    """H100 and MI250X: the kernels compile, divide as IEEE 754 says, and never fuse a product with a sum of values."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from repro.quantize import triton_kernels as kernels

    backend, arch, warp = target.split(":")
    gpu = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))
    division = r"\bdiv\.rn\.f32" if backend == "cuda" else r"\bv_div_fixup_f32"

    def code(kernel, dtype: str, ones: set[str], **constants) -> str:
        """Assembly for tensors of `dtype`; Triton compiles in the arguments that are 1, such as these `ones`."""
        pointers = {"x": dtype, "out": dtype, "payload": "u8", "scales": "fp32", "highest": "i32"}
        types = {name: f"*{pointer}" for name, pointer in pointers.items()} | {"largest": "fp32"}
        constants |= dict.fromkeys(ones.intersection(kernel.arg_names), 1)
        kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        built = compile(ASTSource(kernel, kinds, constants), target=gpu, options={"enable_fp_fusion": False})
        return built.asm["ptx" if backend == "cuda" else "amdgcn"]

    for dtype, ones in (("fp32", set()), ("bf16", {"n", "half", "split", "block", "blocks", "tiles"})):
        code(kernels._find_highest, dtype, ones, G=16, W=256)
        for text in (
            code(kernels._quantize_whole, dtype, ones, INT4=int4, G=16, W=256),
            code(kernels._encode, dtype, ones, INT4=int4, W=1024),
        ):
            assert re.search(division, text) and not re.search(r"\bdiv\.(full|approx)|\.ftz", text)
        for add in (False, True):
            texts = [code(kernels._decode, dtype, ones, ADD=add, INT4=int4, G=16, W=256)]
            if int4:
                texts.append(code(kernels._decode_both, dtype, ones, ADD=add, G=16, W=256))
            # AMD divides integers by v_madmk and v_fmamk, which take a constant.
            assert not any(re.search(r"\bfma\.rn|\bv_(pk_)?(fma|mad|fmac|mac)_f32", text) for text in texts)


@pytest.mark.gpu
@pytest.mark.skipif(not TRITON or not torch.cuda.is_available(), reason="needs a GPU and Triton")
def test_public_functions_use_the_kernels_on_a_gpu(monkeypatch):
    for name in ("quantize", "dequantize"):
        monkeypatch.setattr(reference, name, lambda *_: pytest.fail("the reference ran"))
    x = torch.ones(2, 300, device="cuda")
    payload = quantize.quantize(x, 4, 64)
    quantize.accumulate(payload, x, 4, 64)
    assert torch.equal(quantize.dequantize(payload, 300, 4, 64) + 1, x)
