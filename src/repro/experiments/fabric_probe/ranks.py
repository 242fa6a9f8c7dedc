"""What every rank of a probe does: the collectives of `repro.comm` over every run of levels, at several sizes; and what
a step costs a processor beside them, quantising and the optimizer's update."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from repro import quantize
from repro.comm import Communicator, Route
from repro.experiments.common.launched import timed
from repro.topology import Topology

# Calls that are timed together: after an idle time a shaped link lets a burst through, and a training step has none.
CALLS = 4
VALUES = 1 << 21  # of the tensor that is quantised, and of the one that is updated: more than a cache holds
BLOCK = 256


class Case(NamedTuple):
    """A collective of `nbytes` (a rank's whole tensor, fp32) in the groups over `levels`; over none, work of a rank."""

    collective: str
    levels: tuple[str, ...]
    nbytes: int


QUANTIZE, UPDATE = Case("quantize", (), 4 * VALUES), Case("update", (), 4 * VALUES)
Probe = dict[Case, list[float]]  # seconds of one rank by repeat


def cases(topology: Topology, sizes: list[int]) -> list[Case]:
    """Gathers and reductions over every level, and over all of them in one hop, at every size."""
    names = [level.name for level in topology.levels if level.size > 1]
    hops = [(name,) for name in names] + ([topology.names] if len(names) > 1 else [])
    unit = 4 * topology.world_size  # every rank of every hop has a whole number of fp32 values
    return [
        Case(kind, hop, -(-size // unit) * unit)
        for hop in hops
        for kind in ("all_gather", "reduce_scatter")
        for size in sizes
    ]


def probe(rank: int, world_size: int, topology: Topology, sizes: list[int], repeats: int) -> Probe:
    """Run all cases of some `sizes` in bytes, quantise and restore `VALUES` values, and update as many: each once to connect
    and then `repeats` times."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    communicator = Communicator(topology, device=device)
    values = torch.rand(1, VALUES, device=device)
    parameter = torch.zeros(VALUES, device=device, requires_grad=True)
    parameter.grad = torch.rand_like(parameter)

    def there_and_back() -> Tensor:
        return quantize.dequantize(quantize.quantize(values, 8, BLOCK), VALUES, 8, BLOCK, torch.float32)

    found = {case: _seconds(_collective(communicator, case), repeats) for case in cases(topology, sizes)}
    update = torch.optim.AdamW([parameter], fused=True).step
    return found | {QUANTIZE: _seconds(there_and_back, repeats), UPDATE: _seconds(update, repeats)}


def _collective(communicator: Communicator, case: Case) -> Callable[[], object]:
    route = Route((case.levels,), (32,), BLOCK)
    numel = case.nbytes // 4
    if case.collective == "all_gather":
        shard = torch.rand(numel // communicator.mesh(case.levels).size(), device=communicator.device)
        return lambda: communicator.all_gather(shard, route)
    full = torch.rand(numel, device=communicator.device)
    return lambda: communicator.reduce_scatter(full, route)


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    """Of a call, `CALLS` in a row; the first row is not counted."""

    def row() -> None:
        for _ in range(CALLS):
            work()

    return [timed(row)[1] / CALLS for _ in range(repeats + 1)][1:]
