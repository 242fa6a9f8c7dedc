"""Apply a placement to a model: reorder experts so that a server which deals them out in order puts each on its GPU.

Expert-parallel servers give GPU g the experts g·E/P to (g+1)·E/P - 1 of every layer. With the weights of a layer's
experts and the rows of its router in the order of the placement, these are the experts that it put on g, and the model
computes the same function.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from repro.exflow.recording import is_router
from repro.exflow.serving.slots import physical_to_logical


@torch.no_grad()
def permute_experts(model: nn.Module, gpu: np.ndarray) -> None:
    """Reorder, in place, the experts of every MoE layer of `model` by `gpu`, int [layers, E] (`Placement.gpu`).

    Works on Hugging Face transformers models whose experts are stacked tensors [E, ..] (version 5) or lists of modules.
    Save the result with `save_pretrained`: every server reads it as it would read the original. To undo, apply the
    inverse order.

    Raises ValueError when the layers or experts of the placement are not the model's, and for routers that choose
    groups of experts first (DeepSeek-V2 and V3 with `n_group` > 1) when the order mixes groups.
    """
    layers = list(_layers(model))
    if len(layers) != len(gpu):
        raise ValueError(f"{type(model).__name__} has {len(layers)} MoE layers, the placement {len(gpu)}")
    for number, ((name, router, _), order) in enumerate(zip(layers, physical_to_logical(gpu), strict=True)):
        if router.num_experts != len(order):
            raise ValueError(f"{name} has {router.num_experts} experts, the placement {len(order)} in layer {number}")
        _check_groups(name, router, order)
    for (_, router, experts), order in zip(layers, physical_to_logical(gpu), strict=True):
        index = torch.as_tensor(order)
        for tensor in (*router.parameters(recurse=False), *router.buffers(recurse=False)):
            _reorder(tensor, index)
        if isinstance(experts, nn.ModuleList):
            members = list(experts)
            for slot, expert in enumerate(order.tolist()):
                experts[slot] = members[expert]
        else:
            for tensor in (*experts.parameters(), *experts.buffers()):
                _reorder(tensor, index)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """(name, router, experts) of each MoE layer, in order."""
    for name, module in model.named_modules():
        routers = [child for child in module.children() if is_router(child)]
        if routers and isinstance(getattr(module, "experts", None), nn.Module):
            yield name, routers[0], module.experts


def _reorder(tensor: Tensor, index: Tensor) -> None:
    """Along the first dimension, where that counts experts."""
    if tensor.dim() and tensor.shape[0] == len(index):
        tensor.copy_(tensor[index.to(tensor.device)])


def _check_groups(name: str, router: nn.Module, order: np.ndarray) -> None:
    groups = getattr(router, "num_group", None) or 1
    if groups > 1:
        size = len(order) // groups
        for slots in np.split(order // size, groups):
            if len(set(slots.tolist())) > 1:
                raise ValueError(
                    f"{name} chooses among {groups} groups of {size} experts first; this placement mixes the groups, "
                    "and the reordered model would compute something else"
                )
