"""What the libraries that our ZeRO engine is compared with have in common: one call is one update."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.topology import Topology
from repro.zero.buckets import require_fp32

Batch = tuple[Tensor, Tensor]  # inputs and targets of one micro-batch: `model(*batch)` is the mean loss over it

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Training:
    """What every library is told alike.

    adamw           arguments of `torch.optim.AdamW`
    max_grad_norm   clip to this global norm; None: never
    dtype           float32 or bfloat16, of computation and messages; masters and moments are fp32
    init            for a model on the meta device: fills the parameters that a submodule itself holds, as for
                    `repro.zero.ZeroOptimizer`; default: its `reset_parameters()`
    """

    adamw: dict[str, Any]
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.bfloat16
    init: Callable[[nn.Module], None] | None = None


class Trainer(Protocol):
    """A model with its optimizer, trained by all ranks of the default process group together."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer: a learning-rate schedule changes its `param_groups`. Its parameters are the library's
        own shards, in a layout of the library."""
        ...

    def step(self, batches: Sequence[Batch]) -> float:
        """Forward and backward of every micro-batch, each loss divided by their number, then one update with the
        gradient averaged over the ranks and clipped. Returns the mean loss of this rank's micro-batches; every rank
        brings equally many.

        Raises ValueError without a micro-batch.
        """
        ...

    def held_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank by kind, counted when the last step had all gradients and had not yet updated:
        the moment at which everything that the library keeps exists. Activations and buffers of a collective in flight
        are not counted."""
        ...


def check(model: nn.Module, topology: Topology, dtype: torch.dtype) -> None:
    """ValueError, with the reason, for what no baseline can train."""
    if dtype not in DTYPES:
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


def check_batches(batches: Sequence[Batch]) -> None:
    """ValueError for a step without a micro-batch."""
    if not batches:
        raise ValueError("a step needs at least one micro-batch")


def to(batch: Batch, device: torch.device) -> Batch:
    """The micro-batch on `device`."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
