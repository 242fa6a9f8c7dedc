"""The steps of a decoder, twice: in torch (`torch_kernels.py`, any device; matrix products on a CPU are oneDNN's), and in C++ for a CPU
(`cpp.py`): attention reads keys and values where they lie, only those that count (`steps.cpp`), and products of few rows read weights at
the memory's speed (`products.cpp`)."""

import warnings
from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from repro.models.kernels.linear import GELU, Linear
from repro.models.kernels.torch_kernels import TorchKernels
from repro.models.kv_cache import KVCache
from repro.models.rows import Rows

__all__ = ["GELU", "Attention", "Choice", "Kernels", "Linear", "choose"]

Choice = Literal["auto", "cpp", "torch"]


Attention = Callable[[int, Tensor], Tensor]
"""attend(layer, qkv): rotates queries and keys, stores keys and values, attends: causal, with grouped queries. qkv [n, (heads +
2 kv_heads) · head_dim] to [n, heads · head_dim]."""


class Kernels(Protocol):
    """`name` goes into records."""

    name: str

    def linear(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> Linear:
        """The layer with this weight [out, in] and bias [out]."""
        ...

    def attention(self, rows: Rows, cosine: Tensor, sine: Tensor, cache: KVCache) -> Attention:
        """For one pass. cosine, sine: fp32 [n, pairs], the angles of each head's first pairs of neighbours (2i, 2i + 1); the rest of a
        head stays."""
        ...

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """x [n, width] += y in place (None: nothing); returns RMSNorm(x) · weight."""
        ...

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """[n, 2 · ffn], gate before up, to silu(gate) · up [n, ffn]."""
        ...

    def argmax(self, logits: Tensor) -> Tensor:
        """[n, vocab] to int64 [n]."""
        ...


def choose(choice: Choice, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """`cpp` raises `cpp.BuildError` where it cannot be built, ValueError off the CPU, in other dtypes than float32 and bfloat16, and for
    heads of more than 256 entries. `auto` takes `torch` there; where a build fails it warns and says why."""
    possible = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and head_dim <= 256
    if choice == "torch" or (choice == "auto" and not possible):
        return TorchKernels()
    if not possible:
        raise ValueError(
            f"kernels is 'cpp', dtype {dtype}, device {device}, head_dim {head_dim}; allowed: float32 and bfloat16 on cpu, up to 256"
        )
    from repro.models.kernels.cpp import BuildError, CppKernels

    try:
        return CppKernels()
    except BuildError as error:
        if choice == "cpp":
            raise
        warnings.warn(f"kernels in torch, which are slower: {error}", stacklevel=2)
        return TorchKernels()
