"""The libraries' training systems by name, built alike: same arguments, one `Trainer` out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from repro.baselines import deepspeed, fsdp
from repro.baselines.trainer import Trainer
from repro.topology import Topology

SYSTEMS: dict[str, Callable[..., Trainer]] = {
    "deepspeed_zero3": deepspeed.zero3,
    "deepspeed_zeropp": deepspeed.zeropp,
    "fsdp2": fsdp.fsdp2,
    "fsdp2_hsdp": fsdp.hsdp,
    "fsdp2_reshard": fsdp.fsdp2_reshard,
}


def prepare(name: str) -> None:
    """In the process that forks the ranks: import what they would each import."""
    if name.startswith("deepspeed"):
        deepspeed.prepare()


def build(
    name: str,
    model: nn.Module,
    topology: Topology,
    optimizer_options: dict[str, Any],
    max_grad_norm: float | None,
    dtype: torch.dtype,
) -> Trainer:
    """The system `name` around `model` (fp32), with torch's AdamW; KeyError for an unknown name."""
    return SYSTEMS[name](model, topology, optimizer_options, max_grad_norm, dtype)
