"""What all systems that train have in common: one call is one update."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from repro.topology import Topology
from repro.zero.materialise import require_fp32


@dataclass(frozen=True)
class Training:
    """What every library is told alike.

    adamw           arguments of `torch.optim.AdamW`
    max_grad_norm   clip to this global norm; None: never
    dtype           float32 or bfloat16 (our engine has float16 too), of computation and messages; masters and moments
                    are fp32
    init            for a model on the meta device: fills the parameters that a submodule itself holds, as for
                    `repro.zero.ZeroOptimizer`; default: its `reset_parameters()`
    """

    adamw: dict[str, Any]
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.bfloat16
    init: Callable[[nn.Module], None] | None = None


class Trainer:
    """A model with its optimizer, trained by all ranks of the default process group together. This class itself serves
    `repro.zero.ZeroOptimizer`; each library has a subclass.

    `model(inputs, targets)` is the mean loss over a micro-batch. A learning-rate schedule changes the `param_groups` of
    `optimizer`, a torch optimizer; its parameters are the library's own shards, in a layout of the library.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self._held: dict[str, int] = {}

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Forward and backward of every micro-batch (inputs, targets), each loss divided by their number, then one
        update with the gradient averaged over the ranks and clipped. Returns the mean loss of this rank's
        micro-batches; every rank brings equally many. ValueError without a micro-batch."""
        if not batches:
            raise ValueError("a step needs at least one micro-batch")
        total = 0.0
        for number, batch in enumerate(batches, 1):
            inputs, targets = (tensor.to(self.device, non_blocking=True) for tensor in batch)
            loss = self.model(inputs, targets) / len(batches)
            self._backward(loss, last=number == len(batches))
            total += loss.item()
        self._held = self._count()
        self._update()
        return total

    def held_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank by kind, counted when the last step had all gradients and had not yet updated.
        Activations and buffers of a collective in flight are not counted. Empty before the first step."""
        return self._held

    def _backward(self, loss: Tensor, last: bool) -> None:
        """Backward of one micro-batch, the `last` of a step or an earlier one."""
        loss.backward()

    def _count(self) -> dict[str, int]:
        """The bytes of `held_bytes`, now."""
        return self.optimizer.held_bytes()

    def _update(self) -> None:
        """Clip, update the weights, and drop the gradients."""
        self.optimizer.step()


def check(model: nn.Module, topology: Topology, dtype: torch.dtype) -> None:
    """ValueError, with the reason, for what no library can train."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype is {dtype}, allowed: torch.float32, torch.bfloat16")
    if topology.world_size != dist.get_world_size():
        raise ValueError(f"topology has {topology.world_size} ranks, the process group {dist.get_world_size()}")
    require_fp32(model)


def nodes_and_ranks(topology: Topology) -> tuple[int, int]:
    """(nodes, ranks in each): the libraries know two levels, and take the outermost as the one between nodes.
    ValueError unless there are several nodes of several ranks."""
    nodes = topology.levels[-1].size
    ranks = topology.world_size // nodes
    if nodes < 2 or ranks < 2:
        raise ValueError(f"needs several nodes of several ranks each, the topology has {nodes} x {ranks}")
    return nodes, ranks


def nbytes(values: Iterable[Any]) -> int:
    """Bytes on this rank of the tensors among `values`; of a DTensor, its shard."""
    local = (value.to_local() if isinstance(value, DTensor) else value for value in values)
    return sum(value.nbytes for value in local if isinstance(value, Tensor))
