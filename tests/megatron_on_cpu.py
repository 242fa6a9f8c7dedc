"""Megatron-FSDP where there is no GPU: its modules get a `torch` whose CUDA devices are the CPU, and whose streams are none.
Everything else is the library's and gloo's."""

import contextlib
import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Nothing:
    """A stream or an event: whatever is asked of it happens at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()


class _Cuda:
    Stream = Event = _Nothing
    current_device = staticmethod(lambda: 0)
    current_stream = staticmethod(lambda *_: _Nothing())
    stream = staticmethod(lambda _: contextlib.nullcontext())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Torch:
    cuda = _Cuda()
    device = staticmethod(lambda of, *index: torch.device("cpu" if str(of).startswith("cuda") else of, *index))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def prepare() -> None:
    """In the process of a rank, before a model is sharded."""
    from repro.baselines import megatron

    importlib.import_module("megatron_fsdp")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron_fsdp") and getattr(module, "torch", None) is torch:
            module.torch = _Torch()
    buffers = sys.modules["megatron_fsdp.param_and_grad_buffer"]
    buffers.gradient_reduce_preprocessing = _scaled_sum
    Tensor.cuda = lambda self, *_, **__: self
    Tensor.record_stream = lambda self, _: None
    megatron._require_cuda = lambda device: None


def _scaled_sum(gradient: Tensor, factor: float | None, config: Any) -> Any:
    """As the library's for bfloat16. For other dtypes it takes an operation that only NCCL has: gloo would not scale."""
    if factor is not None:
        gradient.mul_(factor)
    return dist.ReduceOp.SUM
