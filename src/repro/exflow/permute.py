"""Apply a placement to a model: reorder experts so that a server which deals them out in order puts each on its GPU.

Expert-parallel servers give GPU g the experts g·E/P to (g+1)·E/P - 1 of every layer. With experts and rows of the
router in the order of the placement, these are the experts that it put on g, and the model computes the same function.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from repro.exflow.evaluate import check_gpu
from repro.exflow.recording import check_routers, experts_of, is_router
from repro.exflow.serving.export import check_even
from repro.exflow.serving.slots import physical_to_logical


@torch.no_grad()
def permute_experts(model: nn.Module, gpu: np.ndarray) -> None:
    """Reorder, in place, the experts of every MoE layer of `model` by `gpu`, int [layers, E] (`Placement.gpu`).

    Works on Hugging Face transformers models whose experts are stacked tensors [E, .., ..] (version 5) or lists of
    modules, and whose biases of the choice are in the router or in the block around it. Save the result with
    `save_pretrained`: every server reads it as it would read the original. To undo, apply the inverse order.

    Raises ValueError, before anything is changed, when `gpu` is no such array, or of other layers or experts than the
    model's; for unequal numbers of experts on the GPUs; for routers that choose groups of experts first (DeepSeek-V2
    and V3 with `n_group` > 1) when the order mixes groups; for blocks of experts whose router is of no known kind where
    others are; and for a layer whose router, bias or experts lie in tensors of another shape, for instance DeepSpeed's,
    quantised ones or adapters (LoRA) beside stacked experts, or on no device (`meta`, as `device_map` leaves what it
    offloads).
    """
    check_gpu(gpu, int(gpu.max()) + 1)
    check_routers(model)
    layers = list(_layers(model))
    if len(layers) != len(gpu):
        raise ValueError(f"{type(model).__name__} has {len(layers)} MoE layers, the placement {len(gpu)}")
    orders = physical_to_logical(gpu)
    for number, (layer, order) in enumerate(zip(layers, orders, strict=True)):
        _check(layer, order, number)
    check_even(gpu, int(gpu.max()) + 1)
    for layer, order in zip(layers, orders, strict=True):
        index = torch.as_tensor(order)
        for _, tensor in layer.tensors():
            _reorder(tensor, index)
        if isinstance(layer.experts, nn.ModuleList):
            members = list(layer.experts)
            for slot, expert in enumerate(order.tolist()):
                layer.experts[slot] = members[expert]


@dataclass(frozen=True)
class _Layer:
    """A block of a mixture of experts, its router and its experts."""

    name: str
    block: nn.Module
    router: nn.Module
    experts: nn.Module

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """With names below the block: all of the router, whatever the block itself holds (a bias of the choice, for
        instance), and the experts' where they are stacked."""
        parts = [(self.router, True), (self.block, False)]
        parts += [] if isinstance(self.experts, nn.ModuleList) else [(self.experts, True)]
        seen = set[int]()
        for module, inside in parts:
            prefix = "" if module is self.block else f"{type(module).__name__}."
            for name, tensor in (*module.named_parameters(recurse=inside), *module.named_buffers(recurse=inside)):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield prefix + name, tensor


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """MoE layers, in order."""
    for name, module in model.named_modules():
        routers = [child for child in module.children() if is_router(child)]
        if routers and isinstance(getattr(module, "experts", None), nn.Module):
            yield _Layer(name, module, routers[0], module.experts)


def _check(layer: _Layer, order: np.ndarray, number: int) -> None:
    """ValueError where the reordered layer would be another function, or might be."""
    name, experts = layer.name, len(order)
    if (own := experts_of(layer.router)) != experts:
        raise ValueError(f"{name} has {own} experts, the placement {experts} in layer {number}")
    groups = getattr(layer.router, "num_group", None) or 1
    size = experts // groups
    if any(len(set(slots)) > 1 for slots in np.split(order // size, groups)):
        raise ValueError(
            f"{name} chooses among {groups} groups of {size} experts first; this placement mixes the groups, "
            "and the reordered model would compute something else"
        )
    _check_tensors(layer, experts)
    if not any(tensor.dim() == 2 and len(tensor) == experts for tensor in layer.router.parameters()):
        raise ValueError(f"{name}: its router has no weight of {experts} rows")
    stacked = any(tensor.dim() > 2 and len(tensor) == experts for tensor in layer.experts.parameters())
    if not stacked and not isinstance(layer.experts, nn.ModuleList):
        raise ValueError(
            f"{name}: {type(layer.experts).__name__} has no weights of shape [{experts}, .., ..] that could be "
            "reordered (a quantised model is reordered before it is quantised)"
        )


def _check_tensors(layer: _Layer, experts: int) -> None:
    """ValueError for a tensor that cannot be reordered, or that tells nothing of which expert it belongs to."""
    listed = isinstance(layer.experts, nn.ModuleList)
    own = {id(tensor) for tensor in (*layer.experts.parameters(), *layer.experts.buffers())}
    members = layer.experts.named_parameters() if listed else ()  # they move with their modules
    for name, tensor in (*layer.tensors(), *members):
        known = _dimension(tensor, experts) is not None
        if tensor.is_meta:
            raise ValueError(
                f"{layer.name}: {name} is on the meta device, without values to reorder; allowed: a model that is loaded "
                "as a whole (`device_map` offloads layers so)"
            )
        if id(tensor) in own:
            wrong = not (listed or known or tensor.numel() == 1)
        else:
            wrong = experts in tensor.shape and not known
        if wrong:
            raise ValueError(
                f"{layer.name}: {name} is of shape {tuple(tensor.shape)}; known are tensors with a row for each of the "
                f"{experts} experts (adapters are merged first, and a model is reordered before it is quantised)"
            )


def _dimension(tensor: Tensor, experts: int) -> int | None:
    """That which counts experts: the first, or the second behind a first of 1; None: neither."""
    lead = tuple(tensor.shape[:2])
    return 0 if lead[:1] == (experts,) else 1 if lead == (1, experts) else None


def _reorder(tensor: Tensor, index: Tensor) -> None:
    """Along the dimension that counts experts, where there is one."""
    if (dimension := _dimension(tensor, len(index))) is not None:
        tensor.copy_(tensor.index_select(dimension, index.to(tensor.device)))
