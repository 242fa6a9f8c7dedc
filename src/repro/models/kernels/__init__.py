"""The steps of a decoder, three times: in torch (with oneDNN's matrix products on a CPU), in C++ for a CPU (`attention.cpp`,
`products.cpp`, and the small ones in `steps.cpp`), and in Triton for a GPU."""

import warnings
from typing import Literal

import torch

from repro.models.kernels.cpp import BuildError, CppKernels
from repro.models.kernels.torch_kernels import GELU, Attention, Kernels, Linear, Wanted

__all__ = ["GELU", "Attention", "Choice", "Kernels", "Linear", "Wanted", "choose"]

Choice = Literal["auto", "cpp", "triton", "torch"]


def choose(choice: Choice, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels:
    """`auto` takes the fastest that there is for the device, and warns where it cannot be built. What was asked for by
    name raises ValueError where it cannot compute such a model, `cpp.BuildError` or ImportError where it is missing.
    ValueError for a dtype that is none of floating point."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}, allowed: torch.float32, torch.bfloat16 and others of floating point")
    floats = (torch.float32, torch.bfloat16)
    tiled = head_dim * dtype.itemsize <= 1024  # Triton's tiles of prompts have 16 positions at least, in 16 KiB
    possible = {
        "cpp": device.type == "cpu" and dtype in floats and head_dim <= 256,
        "triton": device.type == "cuda" and dtype in (*floats, torch.float16) and tiled,
        "torch": True,
    }
    chosen = next(name for name, can in possible.items() if can) if choice == "auto" else choice
    if not possible.get(chosen):
        raise ValueError(
            f"kernels is {choice!r}, dtype {dtype}, device {device}, head_dim {head_dim}; allowed: "
            f"'cpp' for float32 and bfloat16 on cpu, heads up to 256; 'triton' for these and float16 on cuda, heads up to "
            f"256 in float32 and 512 in the others; 'torch'"
        )
    try:
        if chosen == "cpp":
            return CppKernels()
        if chosen == "triton":
            return _triton(device)
    except (BuildError, ImportError) as error:
        if choice != "auto":
            raise
        warnings.warn(f"kernels in torch, which are slower: {error}", stacklevel=2)
    return Kernels()


def _triton(device: torch.device) -> Kernels:
    from repro.models.kernels.triton_kernels import TritonKernels

    kernels = TritonKernels()
    try:  # Triton compiles when a kernel is first launched, on the current device, and needs a C compiler for that
        with torch.cuda.device(device):
            kernels.silu_multiply(torch.zeros(1, 2, device=device))
    except Exception as error:
        raise BuildError(f"Triton: {error}") from error
    return kernels
