"""The libraries' training systems by name, built alike."""

from collections.abc import Callable

from torch import nn

from repro.baselines import deepspeed, fsdp
from repro.baselines.trainer import Trainer, Training
from repro.topology import Topology

SYSTEMS: dict[str, Callable[[nn.Module, Topology, Training], Trainer]] = {
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
