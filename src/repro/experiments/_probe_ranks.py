"""What every rank of a probe does: the collectives of `repro.comm` over every run of levels, at several sizes; and what a step costs
a processor beside them, quantising and the optimizer's update."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from repro import quantize
from repro.comm import Communicator, Route
from repro.topology import Topology

# Calls that are timed together. A shaped link lets a burst through that it saved up while idle; a training step has no idle links.
CALLS = 4
VALUES = 1 << 21  # of the tensor that is quantised, and of the one that is updated: more than a cache holds
BLOCK = 256


@dataclass(frozen=True)
class Case:
    """A collective of `nbytes` (a rank's whole tensor, fp32) in the groups over `levels`."""

    collective: str
    levels: tuple[str, ...]
    nbytes: int


@dataclass
class Probe:
    """Of one rank, while all others do the same: seconds of each case [cases][repeats], and of quantising and restoring `VALUES` values,
    and of updating as many [repeats]."""

    seconds: list[list[float]]
    quantize_s: list[float]
    update_s: list[float]


def cases(topology: Topology, sizes: list[int]) -> list[Case]:
    """Gathers and reductions over every single level, and over all of them in one hop, at every size (a multiple of the ranks)."""
    names = [level.name for level in topology.levels if level.size > 1]
    hops = [(name,) for name in names] + ([topology.names] if len(names) > 1 else [])
    unit = 4 * topology.world_size  # every rank of every hop has a whole number of fp32 values
    return [
        Case(kind, hop, -(-size // unit) * unit)
        for hop in hops
        for kind in ("all_gather", "reduce_scatter")
        for size in sizes
    ]


def probe(rank: int, world_size: int, topology: Topology, wanted: list[Case], repeats: int) -> Probe:
    """Run all cases, each once to connect and then `repeats` times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    communicator = Communicator(topology, device=device)
    return Probe(
        [list(_timed(_collective(communicator, case, device), repeats)) for case in wanted],
        list(_timed(_quantising(device), repeats)),
        list(_timed(_updating(device), repeats)),
    )


def _collective(communicator: Communicator, case: Case, device: str) -> Callable[[], object]:
    route = Route((case.levels,), (32,), BLOCK)
    ranks = communicator.mesh(case.levels).size()
    numel = case.nbytes // 4
    if case.collective == "all_gather":
        shard = torch.rand(numel // ranks, device=device)
        return lambda: communicator.all_gather(shard, route)
    full = torch.rand(numel, device=device)
    return lambda: communicator.reduce_scatter(full, route)


def _quantising(device: str) -> Callable[[], object]:
    """INT8 and back, as a gather does."""
    x = torch.rand(1, VALUES, device=device)
    return lambda: quantize.dequantize(quantize.quantize(x, 8, BLOCK), VALUES, 8, BLOCK, torch.float32)


def _updating(device: str) -> Callable[[], object]:
    parameter = torch.zeros(VALUES, device=device, requires_grad=True)
    parameter.grad = torch.rand_like(parameter)
    return torch.optim.AdamW([parameter], fused=True).step


def _timed(work: Callable[[], object], repeats: int) -> Iterator[float]:
    """Seconds of a call, `CALLS` in a row; the first row is not counted."""
    for repeat in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if repeat:
            yield (time.perf_counter() - start) / CALLS
