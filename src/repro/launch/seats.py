"""Do the ranks of a job sit as the topology says? A rank on the wrong node would make every byte count false."""

import os
import socket
from typing import Any, NamedTuple

from repro.launch.errors import PlacementError
from repro.launch.variables import number
from repro.topology import Topology

# A rank's own GPU, or the list of its node's; ROCR is AMD's, which Slurm sets for MI250X GCDs.
_DEVICES = ("ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
IN_PACKAGE = "REPRO_GCDS_PER_PACKAGE"  # of the hardware; set by the job, from the platform file


class Seat(NamedTuple):
    """Where one rank is; `device`: number of its GPU in the node, None where nothing tells it."""

    host: str
    device: int | None


def check_placement(topology: Topology) -> None:
    """Compare the seats of all ranks (collective) with the topology; PlacementError, on all ranks alike."""
    import torch.distributed as dist

    seats: list[Any] = [None] * topology.world_size
    dist.all_gather_object(seats, seat())
    compare(topology, seats, number(IN_PACKAGE, 1) if IN_PACKAGE in os.environ else topology.levels[0].size)


def seat() -> Seat:
    """This rank's, from Slurm's and torchrun's environment."""
    for name in _DEVICES:
        shown = [part for part in os.environ.get(name, "").split(",") if part.isdecimal()]
        if shown:
            return Seat(socket.gethostname(), int(shown[int(os.environ.get("LOCAL_RANK", "0")) % len(shown)]))
    return Seat(socket.gethostname(), None)


def compare(topology: Topology, seats: list[Seat], gpus_per_package: int) -> None:
    """PlacementError unless ranks share a host where they share a node of the topology, and only there; and, where GPU
    numbers are known, a package of `gpus_per_package` neighbouring GPUs where they share a package, and only there.
    Nothing is compared for a topology without a level called `node`."""
    if "node" not in topology.names:
        return
    hosts = [seat.host for seat in seats]
    _same(hosts, topology.span("node"), "node", "host", seats)
    packages = [f"{host}, package {gpu // gpus_per_package}" for host, gpu in seats if gpu is not None]
    if len(packages) == len(seats):
        _same(packages, topology.span(topology.names[0]), topology.names[0], "package", seats)


def _same(found: list[str], span: int, level: str, kind: str, seats: list[Seat]) -> None:
    first_on: dict[str, int] = {}
    for rank, place in enumerate(found):
        leader = rank // span * span
        if place != found[leader]:
            raise PlacementError(
                f"rank {rank} should share a {level} with rank {leader}, but is on another {kind}: "
                f"{seats[rank]} and {seats[leader]}"
            )
        if first_on.setdefault(place, leader) != leader:
            raise PlacementError(
                f"rank {rank} should be on another {level} than rank {first_on[place]}, but both are on {kind} {place}"
            )
