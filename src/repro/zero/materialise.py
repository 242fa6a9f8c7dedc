"""Weights to start from: checks, models too large to exist on one rank (they arrive on the meta device and become real
bucket by bucket, so that a rank holds one whole bucket at a time), and rank 0's values for all."""

import math
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def materialise(module: nn.Module, device: torch.device | str, init: Callable[[nn.Module], None] | None) -> None:
    """Give the parameters and buffers of `module` that are on the meta device memory on `device`, and fill them.

    `init(submodule)` must fill the parameters and buffers that `submodule` holds itself; left out, its
    `reset_parameters()` is called, as torch's own layers have it. Ties stay tied. ValueError if it has neither, and, when
    parts of the module are real already, if `reset_parameters()` does not write to a buffer.
    """
    require_init(module, init)
    real: dict[int, nn.Parameter] = {}
    fresh: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    for submodule in module.modules():
        unreal = _unreal(submodule)
        for key, tensor in unreal.items():
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                empty = real.setdefault(id(tensor), nn.Parameter(empty, requires_grad=tensor.requires_grad))
            setattr(submodule, key, empty)
        if unreal:
            fresh.append((submodule, {key: submodule.get_buffer(key) for key in unreal if key in submodule._buffers}))
    for submodule, buffers in fresh:
        with torch.no_grad():
            if init:
                init(submodule)
            else:
                _reset(submodule, buffers)


def _reset(module: nn.Module, empty: dict[str, torch.Tensor]) -> None:
    """`module.reset_parameters()`, which must also write to the `empty` buffers: many modules compute theirs elsewhere."""
    for buffer in empty.values():
        if buffer.is_floating_point():
            buffer.fill_(math.nan)
    before = {key: buffer._version for key, buffer in empty.items()}
    module.reset_parameters()  # type: ignore[operator]
    for key, buffer in empty.items():
        untouched = module._buffers[key] is buffer and buffer._version == before[key] and buffer.numel()
        # What is written through `.data` has no version.
        if untouched and (not buffer.is_floating_point() or buffer.isnan().all()):
            raise ValueError(
                f"{type(module).__name__}.reset_parameters() leaves buffer {key} as it was, which on the meta device is "
                "without values: make the model anew, and give `init`, a function that fills a module's own parameters "
                "and buffers"
            )


def require_init(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """ValueError for a submodule that `materialise` cannot fill."""
    for name, submodule in module.named_modules():
        if init is None and _unreal(submodule) and not hasattr(submodule, "reset_parameters"):
            raise ValueError(
                f"{name or type(module).__name__} ({type(submodule).__name__}) is on the meta device and has no "
                "reset_parameters(): give `init`, a function that fills a module's own parameters"
            )


def _unreal(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers that `module` itself holds on the meta device."""
    mine = {**module._parameters, **module._buffers}
    return {key: tensor for key, tensor in mine.items() if tensor is not None and tensor.is_meta}


def default_device(model: nn.Module) -> str:
    """Type of the device of the model; for one on the meta device CUDA (ROCm) where there is one, else the CPU."""
    where, gpu = next(model.parameters()).device.type, torch.cuda.is_available()
    if where == "cpu" and gpu:
        warnings.warn("the model is on the CPU and trains there, beside a GPU: model.cuda() first", stacklevel=3)
    return where if where != "meta" else "cuda" if gpu else "cpu"


def require_fp32(model: nn.Module) -> None:
    """ValueError for a parameter of another dtype."""
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            needs = "the masters need fp32 values to start from (model.float())"
            raise ValueError(f"parameter {name} is {parameter.dtype}: {needs}")


def broadcast_from_first(module: nn.Module) -> None:
    """Give all ranks rank 0's values of the parameters that are not sharded yet, and of the buffers."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            values = tensor.data
            dense = values.contiguous()  # a broadcast takes the memory from its beginning on, whatever the strides
            dist.broadcast(dense, src=0)
            if dense is not values:
                once(values, values).copy_(once(values, dense))


def once(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` that has memory of its own in `like`: less than all where that is expanded."""
    for dim in range(like.dim()):
        if like.stride(dim) == 0 and like.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
