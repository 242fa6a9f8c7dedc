"""Builds `steps.cpp`, `attention.cpp` and `products.cpp` on first use, for this machine and this torch, and calls them."""

import copy
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from repro.models.kernels.torch_kernels import GELU, Attention, Kernels, Linear, Wanted
from repro.models.kv_cache import KVCache
from repro.models.rows import Rows

_SOURCES = [Path(__file__).with_name(name) for name in ("steps.cpp", "attention.cpp", "products.cpp")]
_HEADERS = [Path(__file__).with_name(f"{name}.h") for name in ("cache", "matrices", "numbers", "threads", "tiles")]
_FLAGS = ("-std=c++20", "-O3", "-ffast-math", "-march=native", "-fopenmp", "-fPIC")


class BuildError(RuntimeError):
    """Kernels that could not be built or loaded: no compiler, one that refused, or a folder that cannot be written."""


class CppKernels(Kernels):
    """On a CPU, in float32 or bfloat16. Raises BuildError where they cannot be built."""

    name = "C++"

    def __init__(self) -> None:
        _load()
        self._ops = torch.ops.repro_models
        self.add_norm, self.silu_multiply, self.take = self._ops.add_norm, self._ops.silu_multiply, self._ops.take

    def linear(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> Linear:
        """In panels, but for a weight that has none."""
        layer = PanelLinear if self._ops.panel_shape(weight) else super().linear
        return layer(weight, bias, gelu)

    def gated(self, layer: Linear) -> Linear:
        """In the product, where half of its outputs are whole panels."""
        plain = isinstance(layer, PanelLinear) and layer.bias is None and not layer.after
        return layer.gated() if plain and layer.outputs % (2 * layer.width) == 0 else super().gated(layer)

    def attention(
        self, rows: Rows, cosine: Tensor, sine: Tensor, cache: KVCache, wanted: Wanted = slice(None)
    ) -> Attention:
        place, prompt = (rows.slots, rows.positions), _of_prompts(rows)
        places = [(*place, prompt)] * (cache.layers - 1)
        places += [tuple(part if part is None else part[wanted] for part in (*place, prompt))]

        def attend(layer: int, qkv: Tensor) -> Tensor:
            keys, values, table = cache.parts(layer)
            queries = self._ops.rotate_store(qkv, cosine, sine, *place, keys, values, table)
            slots, positions, prompt = places[layer]
            if layer == cache.layers - 1:
                queries = queries[wanted] if isinstance(wanted, slice) else self._queries(queries, wanted)
            return self._ops.attend(queries, keys, values, slots, positions, table, prompt)

        return attend

    def _queries(self, queries: Tensor, wanted: Tensor) -> Tensor:
        """Some of them, without torch's parallel loop."""
        return self.take(queries.flatten(1), wanted).view(-1, *queries.shape[1:])

    def argmax(self, logits: Tensor) -> Tensor:
        return self._ops.argmax(logits.contiguous())


def _of_prompts(rows: Rows) -> Tensor | None:
    """Bool [n]: which rows are of prompts; None where all decode."""
    if not any(span.prompt for span in rows.spans):
        return None
    marks = torch.zeros(len(rows.tokens), dtype=torch.bool, device="cpu")
    for span, end in zip(rows.spans, accumulate(span.rows for span in rows.spans), strict=True):
        if span.prompt:
            marks[end - span.rows : end] = True
    return marks


class PanelLinear:
    """The weight in panels of as many outputs as two vectors of this processor hold. In bfloat16 it is multiplied by AMX
    or AVX512_BF16 where there is one, else in float32. ValueError for a weight that has no panels, in bfloat16 on
    processors with either: an odd number of inputs, or AMX that the system does not let this process use."""

    layout = "panels"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> None:
        shape = torch.ops.repro_models.panel_shape(weight)
        if not shape:
            raise ValueError(f"a weight of {list(weight.shape)} in {weight.dtype} has no panels on this processor")
        self.width, deep = shape
        rows = F.pad(weight, (0, 0, 0, -len(weight) % self.width))  # outputs of zero
        # [out, in] to [panels, in / deep, width, deep]
        self.panels = rows.view(-1, self.width, weight.shape[1] // deep, deep).transpose(1, 2).contiguous()
        self.bias, self.outputs, self.after = bias, len(weight), gelu or ""

    def gated(self) -> "PanelLinear":
        """The SiLU of its first half of outputs, times the second. The weight is shared."""
        layer = copy.copy(self)
        layer.outputs, layer.after = self.outputs // 2, "silu"
        return layer

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.repro_models.product(x.contiguous(), self.panels, self.outputs, self.bias, self.after)


@functools.cache
def _load() -> None:
    """Built once per machine: the file's name holds a hash of source, torch, compiler and processor."""
    from torch.utils.cpp_extension import get_default_build_root

    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise BuildError("no C++ compiler found (Debian: apt-get install g++; or set CXX)")
    texts = [torch.__version__, compiler, _processor(), *_FLAGS]
    made_of = [*(file.read_bytes() for file in (*_SOURCES, *_HEADERS)), *map(str.encode, texts)]
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    library = folder / f"repro_models_{hashlib.sha256(b'|'.join(made_of)).hexdigest()[:16]}.so"
    if not library.is_file():
        _build(compiler, library)
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise BuildError(f"{library}: {error}") from error


def _build(compiler: str, library: Path) -> None:
    """Under another name first, so that whoever is interrupted or builds at the same time leaves nothing half done. Two
    steps: linked with -ffast-math, a library of older GCCs makes its whole process flush subnormal numbers to zero."""
    from torch.utils.cpp_extension import include_paths, library_paths

    headers, libraries = [f"-I{path}" for path in include_paths()], [f"-L{path}" for path in library_paths()]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor() as pool:
            compile_one = functools.partial(_call, compiler, *_FLAGS, *headers, "-c")
            objects, linked = [Path(folder) / f"{source.stem}.o" for source in _SOURCES], Path(folder) / library.name
            list(pool.map(lambda source, to: compile_one(source, "-o", to), _SOURCES, objects))
            _call(compiler, "-shared", "-fopenmp", *objects, "-o", linked, *libraries, "-ltorch_cpu", "-lc10")
            os.replace(linked, library)
    except OSError as error:
        raise BuildError(f"{library.parent}: {error}") from error


def _call(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = next((line for line in said if "error" in line), said[-1])
        raise BuildError(f"{command[0]} could not build the kernels: {reason}")


def _processor() -> str:
    """Its name and the instructions that it has: folders are shared between machines that differ in them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
