"""Builds `cpu.cpp` on first use, for this machine and this torch, and calls it."""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from repro.models.kv_cache import KVCache
from repro.models.rows import Rows

__all__ = ["BuildError", "CppKernels"]

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-std=c++20", "-O3", "-ffast-math", "-march=native", "-fopenmp", "-fPIC")


class BuildError(RuntimeError):
    """No compiler, or one that refused."""


class CppKernels:
    """`Kernels` on a CPU, in float32 or bfloat16. Raises BuildError where they cannot be built."""

    name = "C++"

    def __init__(self) -> None:
        _load()
        self._ops = torch.ops.repro_models

    def attention(self, rows: Rows, cosine: Tensor, sine: Tensor, cache: KVCache) -> Callable[[int, Tensor], Tensor]:
        place = (rows.slots, rows.positions)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            keys, values, table = cache.parts(layer)
            queries = self._ops.rotate_store(qkv, cosine, sine, *place, keys, values, table)
            return self._ops.attend(queries, keys, values, *place, table)

        return attend

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return self._ops.add_norm(x, y, weight, eps)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        return self._ops.silu_multiply(gate_up)

    def argmax(self, logits: Tensor) -> Tensor:
        return self._ops.argmax(logits.contiguous())


@functools.cache
def _load() -> None:
    """Once per process. Built once per machine: the file's name holds the source, torch, compiler and processor it is for."""
    from torch.utils.cpp_extension import get_default_build_root

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler found (Debian: apt-get install g++; or set CXX)")
    made_of = [
        _SOURCE.read_bytes(),
        torch.__version__.encode(),
        compiler.encode(),
        _processor(),
        *map(str.encode, _FLAGS),
    ]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    library = folder / f"repro_models_{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}.so"
    if not library.is_file():
        _build(compiler, library)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise BuildError(f"{library}: {error}") from error


def _build(compiler: str, library: Path) -> None:
    """Under another name first, so that whoever is interrupted or builds at the same time leaves nothing half done. Two steps: linked with
    -ffast-math, a library of older GCCs makes its whole process flush subnormal numbers to zero."""
    from torch.utils.cpp_extension import include_paths, library_paths

    headers, libraries = [f"-I{path}" for path in include_paths()], [f"-L{path}" for path in library_paths()]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            compiled, linked = Path(folder) / "cpu.o", Path(folder) / library.name
            _call([compiler, *_FLAGS, *headers, "-c", str(_SOURCE), "-o", str(compiled)])
            _call(
                [compiler, "-shared", "-fopenmp", str(compiled), "-o", str(linked), *libraries, "-ltorch_cpu", "-lc10"]
            )
            os.replace(linked, library)
    except OSError as error:
        raise BuildError(f"{library.parent}: {error}") from error


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in said if "error" in line), said[-1])
        raise BuildError(f"{command[0]} could not build {_SOURCE.name}: {reason}")


def _processor() -> bytes:
    """Its name and the instructions that it has: folders are shared between machines that differ in them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor().encode()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})).encode()
