"""What every rank of a probe does: the collectives of `repro.comm` over each level and over all, at several sizes, and
what a step costs a processor beside them: quantising and the optimizer's update. Then the fit: the ranks' seconds,
parameters, errors on sizes not fitted."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch._dynamo  # (AdamW imports it on first use: once here, not in every rank)
from torch import Tensor

from repro import quantize
from repro.comm import Communicator, Route
from repro.experiments.base import Outcome
from repro.experiments.common.launched import Ranks, ranks_of, timed
from repro.experiments.fabric_probe import EXPERIMENT, FabricProbe, ProbeMetrics
from repro.scaling import Machine, fit
from repro.scaling.step import UPDATE_BYTES
from repro.topology import Topology

# Calls that are timed together: after an idle time a shaped link lets a burst through, and a training step has none.
CALLS = 4
VALUES = 1 << 21  # of the tensor that is quantised, and of the one that is updated: more than a cache holds
BLOCK = 256
FASTER = 4.0  # One rate of shaped links cannot tell slow links from slow processors, which move the same bytes.


def run(point: FabricProbe) -> Outcome:
    """Measure, on a shaped network also with faster links; fit every second size, and predict the others. The series goes to
    `repro.scaling.fit` as `measured_files.read_probe` reads it."""
    quantize.warm_up()
    sizes = [point.largest_kib * 1024 // 4**k for k in reversed(range(5))]
    started = time.monotonic()
    with ranks_of(point, EXPERIMENT.timeout_s) as ranks:
        shaped = ranks.links.state == "shaped"
        probes = [(1.0, ranks.run(probe, point.topology, sizes, point.repeats, last=not shaped))]
    if shaped:
        faster = point.model_copy(update={"cluster_mbit_s": FASTER * point.cluster_mbit_s})
        with ranks_of(faster, EXPERIMENT.timeout_s - (time.monotonic() - started)) as others:
            probes.append((FASTER, others.run(probe, point.topology, sizes, point.repeats)))
    found = fitted(ranks, probes)
    series = found.table.assign(hop=["+".join(hop) for hop in found.table.hop]).drop(columns="sizes")
    return ranks.outcome(found.metrics, series)


# --- ranks ---------------------------------------------------------------------------------------------------------


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


# --- fit -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Probed:
    """The fit to every second size, a table with predictions for all, and the machine, for measured compute; with links at
    `scale` times the fitted rates."""

    metrics: ProbeMetrics
    table: pd.DataFrame
    machine: Callable[[float], Machine]


def fitted(ranks: Ranks, probes: Sequence[tuple[float, Sequence[Probe]]]) -> Probed:
    """From what all ranks measured, each time with the links set to a multiple of the rates that are fitted. Where there
    are GPUs the collectives are the backend's, rings; else those of `repro.comm`. Except on a network of the machine's own,
    all ranks share the processors of one machine."""
    native, host = torch.cuda.is_available(), ranks.links.state != "the machine's own"
    topology = ranks.point.topology
    sizes = tuple(level.size for level in topology.levels)
    seconds = [(scale, _seconds_of(each)) for scale, each in probes]
    updated, quantized = (  # a value is quantised and restored
        times * VALUES / float(np.median([each.pop(work) for _, each in seconds]))
        for work, times in ((UPDATE, 1), (QUANTIZE, 2))
    )
    tables = [_measured(sizes, each, native).assign(scale=scale) for scale, each in seconds]
    table = pd.concat(tables, keys=range(len(tables)), names=["probe", None]).reset_index("probe")
    every_second = table.groupby(["probe", "collective", "hop"], sort=False).cumcount() % 2 == 0
    table = table.drop(columns="probe")
    algorithms = {"ring": ("ring",), "direct": ("direct",)}
    found = fit.fit(table[every_second], fit.Model(topology.names, algorithms=algorithms, reduces=True, host=host))
    table = fit.predict(found, table).assign(fitted=every_second.to_numpy())
    median, p90 = fit.error_quantiles(table[~table.fitted].log_error)
    metrics = ProbeMetrics(
        error_median=median,
        error_p90=p90,
        quantize_values_per_s=quantized,
        update_values_per_s=updated,
        **{row.parameter.removesuffix(".0").replace(".", "_"): row.value for row in found.table().itertuples()},
    )

    def machine(scale: float) -> Machine:
        return Machine(
            network=found.network(*sizes, scale=scale),
            flops_per_s=np.inf,
            hbm_bytes_per_s=UPDATE_BYTES * updated,
            launch_s=0.0,
            overlap=0.0,  # compute and messages share the processors
            quantize_values_per_s=quantized,
            native=native,
        )

    return Probed(metrics, table, machine)


def _seconds_of(ranks: Sequence[Probe]) -> dict[Case, float]:
    """Seconds of each case: until the slowest rank has done it, the median of its repeats."""
    slowest = np.max([list(each.values()) for each in ranks], axis=0)  # [cases, repeats]
    return dict(zip(ranks[0], np.median(slowest, axis=1).tolist(), strict=True))


def _measured(sizes: tuple[int, ...], seconds: Mapping[Case, float], native: bool) -> pd.DataFrame:
    """A row per case, for `repro.scaling.fit`."""
    return pd.DataFrame(
        {
            "source": "probe",
            "collective": case.collective,
            "algorithm": "ring" if native or len(case.levels) > 1 else "direct",
            "sizes": sizes,
            "hop": case.levels,
            "nbytes": case.nbytes,
            "seconds": found,
        }
        for case, found in seconds.items()
    )
