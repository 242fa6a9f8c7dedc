"""What `ZeroOptimizer` refuses, all of it before it touches the model: a ValueError that names the argument."""

import math
import reprlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from repro.comm import Communicator
from repro.zero.buckets import uses
from repro.zero.layout import NO_ROWS
from repro.zero.loss_scale import LossScale
from repro.zero.materialise import require_fp32, require_init
from repro.zero.plan import Plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(
    model: nn.Module,
    plan: Plan,
    buckets: list[nn.Module] | None,
    init: Callable[[nn.Module], None] | None,
    **others: Any,
) -> None:
    """The arguments of `ZeroOptimizer` but for the optimizer, its options and its parameters (`masters.py`)."""
    for name, value, fits, allowed in _arguments(model, plan, buckets, init, **others):
        if not fits:
            raise ValueError(f"{name} is {reprlib.repr(value)}, allowed: {allowed}")
    for name, parameter in model.named_parameters():
        if reason := _unfit(parameter):
            raise ValueError(f"model: parameter {name} {reason}")
    require_fp32(model)
    require_init(model, init)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model: the model has no parameter that requires a gradient")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(f"model: {name or type(module).__name__} has sparse=True, allowed: dense gradients")
    if buckets is not None:
        _check_buckets(model, buckets)


def _arguments(
    model: object,
    plan: object,
    buckets: object,
    init: object,
    weight_dtype: object,
    buffer_dtype: object,
    gradient_dtype: object,
    max_grad_norm: object,
    loss_scale: object,
    communicator: object,
    device: object,
    broadcast: object,
    accumulation: object,
    late_weights: object,
) -> Iterator[tuple[str, object, bool, str]]:
    """Name, value, whether it may be so, and what may be. One after the other: a row may use what those before say."""
    dtypes = ", ".join(map(str, DTYPES))
    yield "model", model, isinstance(model, nn.Module), "a torch.nn.Module"
    yield "plan", plan, isinstance(plan, Plan), "a repro.zero.Plan, such as plan.zero3(topology)"
    yield "weight_dtype", weight_dtype, weight_dtype in DTYPES, dtypes
    yield (
        "buffer_dtype",
        buffer_dtype,
        buffer_dtype in (None, *DTYPES),
        f"{dtypes}, or None to leave buffers as they are",
    )
    yield "gradient_dtype", gradient_dtype, gradient_dtype in DTYPES, dtypes
    limit = "a positive finite number, or None for no limit"
    yield "max_grad_norm", max_grad_norm, max_grad_norm is None or _positive(max_grad_norm), limit
    yield "loss_scale", loss_scale, loss_scale is None or isinstance(loss_scale, LossScale), "a zero.LossScale, or None"
    yield "buckets", buckets, buckets is None or isinstance(buckets, list), "modules of the model, or None"
    yield "init", init, init is None or callable(init), "a function of a module, or None"
    given = communicator is not None
    yield "communicator", communicator, not given or isinstance(communicator, Communicator), "a comm.Communicator"
    if isinstance(communicator, Communicator) and isinstance(plan, Plan):
        fits = communicator.topology == plan.topology
        yield "communicator.topology", communicator.topology, fits, f"that of the plan, {plan.topology}"
        yield (
            "device",
            device,
            device in (None, communicator.device),
            f"that of the communicator, {communicator.device}",
        )
    yield "device", device, device in (None, "cpu", "cuda"), "'cpu', 'cuda', or None for that of the model"
    yield "device", device, device != "cuda" or torch.cuda.is_available(), "'cpu': torch finds no GPU here"
    yield "broadcast", broadcast, isinstance(broadcast, bool), "True, False"
    whole = type(accumulation) is int and accumulation > 0
    yield "accumulation", accumulation, accumulation is None or whole, "an integer of at least 1, or None"
    yield "late_weights", late_weights, isinstance(late_weights, bool), "True, False"


def _positive(value: object) -> bool:
    """A positive finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _unfit(parameter: Tensor) -> str:
    """Why FSDP or the masters cannot have a parameter; "" if they can."""
    if isinstance(parameter, DTensor):
        return "is sharded already: a model is wrapped once"
    if is_lazy(parameter):
        return "has no shape yet: run the model before it is wrapped"
    if parameter.layout != torch.strided or not parameter.is_contiguous():
        return f"is {parameter.layout}, stride {parameter.stride()}: allowed are dense contiguous tensors"
    if not parameter.dim():
        return NO_ROWS
    return "" if parameter.numel() else f"has no values, shape {tuple(parameter.shape)}"


def _check_buckets(model: nn.Module, buckets: list[nn.Module]) -> None:
    names = {module: name for name, module in model.named_modules() if name}
    everywhere = uses(model)
    taken: list[nn.Module] = []
    for number, module in enumerate(buckets):
        known = isinstance(module, nn.Module) and module in names
        where = f"buckets[{number}] ({names[module] if known else type(module).__name__})"
        if not known:
            raise ValueError(f"{where} is no part of the model; allowed are modules below the model itself")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{where} is a {type(module).__name__}, which has no forward; allowed are its members")
        if any(module in earlier.modules() for earlier in taken):
            raise ValueError(
                f"{where} is in an earlier bucket already; inner modules come before outer ones, each once"
            )
        if not uses(module).items() <= everywhere.items():
            raise ValueError(f"{where} shares a parameter with a module outside of it: leave both to the root's bucket")
        taken.append(module)
