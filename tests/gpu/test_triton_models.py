"""The kernels of the decoders in Triton where there is no GPU: run in Triton's interpreter, and compiled for an NVIDIA and an AMD GPU.
On a GPU they are tested by `tests/models/test_triton_kernels.py`, as they are in the interpreter."""

from pathlib import Path

import pytest
from triton_folder import TRITON, pytest_with_triton, with_folder

POINTERS = {"slots", "positions", "table"}  # of int64
FLOATS = {"cosine", "sine", "sums", "marks"}  # of fp32
SCALARS = {"scale": "fp32", "eps": "fp32"}
DTYPED = {"qkv", "keys", "values", "queries", "x", "y", "weight", "out", "gate_up"}


@with_folder
@pytest.mark.parametrize(
    "choice", ["float32 or decodes", pytest.param("not (float32 or decodes)", marks=pytest.mark.exhaustive)]
)
def test_results_in_the_interpreter(tmp_path, choice):
    file = Path(__file__).parents[1] / "models" / "test_triton_kernels.py"
    pytest_with_triton(file, choice, tmp_path, TRITON_INTERPRET="1")


@pytest.mark.slow
@with_folder
def test_compiles_without_a_gpu(tmp_path):
    pytest_with_triton(Path(__file__), "test_code_for", tmp_path, TRITON_INTERPRET="0")


@pytest.mark.skipif(not TRITON, reason="test_compiles_without_a_gpu runs it")
@pytest.mark.parametrize("target", ["cuda:90:32", "hip:gfx90a:64"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_code_for(target, dtype):
    """H100 and MI250X."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from repro.models.kernels import triton_kernels as kernels

    backend, arch, warp = target.split(":")
    gpu = GPUTarget(backend, int(arch) if arch.isdigit() else arch, int(warp))

    def code(kernel, **constants) -> str:
        kinds = {name: SCALARS.get(name, "i32") for name in kernel.arg_names}
        kinds |= {name: "*i64" for name in POINTERS & kinds.keys()}
        kinds |= {name: "*fp32" for name in FLOATS & kinds.keys()}
        kinds |= {name: f"*{dtype}" for name in DTYPED & kinds.keys()}
        kinds |= dict.fromkeys(constants, "constexpr")
        return compile(ASTSource(kernel, kinds, constants), target=gpu).asm["ptx" if backend == "cuda" else "amdgcn"]

    for table in (False, True):
        assert code(kernels._rotate_store, HALF=32, HAS_TABLE=table)
        assert code(kernels._attend_split, DIM=64, TILE=16, SPLIT=128, BLOCK=32, HAS_TABLE=table)
        assert code(kernels._attend_tile, DIM=64, TILE=64, BLOCK=64, HAS_TABLE=table)
        assert code(kernels._add_norm, HAS_Y=table, WIDTH=512)
    assert code(kernels._attend_join, DIM=64, SPLIT=128, SPLITS=4)
    assert code(kernels._silu_multiply, WIDTH=1024)
