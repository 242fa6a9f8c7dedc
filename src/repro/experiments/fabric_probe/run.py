"""Probe the network on its ranks, and fit: a table of the ranks' seconds, parameters, errors on sizes not fitted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch._dynamo  # (AdamW imports it on first use: once here, not in every rank)

from repro import quantize
from repro.experiments.base import Outcome
from repro.experiments.common.launched import Ranks, ranks_of
from repro.experiments.fabric_probe import EXPERIMENT, FabricProbe, ProbeMetrics
from repro.experiments.fabric_probe.ranks import QUANTIZE, UPDATE, VALUES, Case, Probe, probe
from repro.scaling import Machine, fit
from repro.scaling.step import UPDATE_BYTES


def run(point: FabricProbe) -> Outcome:
    """Measure, fit every second size, and predict the others. The series can be given to `repro.scaling.fit`."""
    quantize.warm_up()
    sizes = [point.largest_kib * 1024 // 4**k for k in reversed(range(5))]
    with ranks_of(point, EXPERIMENT.timeout_s) as ranks:
        probes = ranks.run(probe, point.topology, sizes, point.repeats)
    found = fitted(ranks, probes)
    series = found.table.assign(hop=["+".join(hop) for hop in found.table.hop]).drop(columns="sizes")
    return ranks.outcome(found.metrics, series)


@dataclass(frozen=True, eq=False)
class Probed:
    """The fit to every second size, a table with predictions for all, and the machine, for measured compute."""

    metrics: ProbeMetrics
    table: pd.DataFrame
    machine: Machine


def fitted(ranks: Ranks, probes: Sequence[Probe]) -> Probed:
    """From what all ranks measured. Where there are GPUs the collectives are the backend's, rings; else those of
    `repro.comm`. Except on a network of the machine's own, all ranks share the processors of one machine."""
    native, host = torch.cuda.is_available(), ranks.links.state != "the machine's own"
    topology = ranks.point.topology
    sizes = tuple(level.size for level in topology.levels)
    slowest = np.max([list(probe.values()) for probe in probes], axis=0)  # [cases, repeats]: a case lasts so long
    seconds = dict(zip(probes[0], np.median(slowest, axis=1).tolist(), strict=True))
    quantize, update = (VALUES / seconds.pop(work) for work in (QUANTIZE, UPDATE))
    table = _measured(sizes, seconds, native)
    every_second = table.groupby(["collective", "hop"], sort=False).cumcount() % 2 == 0
    algorithms = {"ring": ("ring",), "direct": ("direct",)}
    found = fit.fit(table[every_second], fit.Model(topology.names, algorithms=algorithms, reduces=True, host=host))
    table = fit.predict(found, table).assign(fitted=every_second.to_numpy())
    machine = Machine(
        network=found.network(*sizes),
        flops_per_s=np.inf,
        hbm_bytes_per_s=UPDATE_BYTES * update,
        launch_s=0.0,
        overlap=0.0,  # compute and messages share the processors
        quantize_values_per_s=quantize,
        native=native,
    )
    median, p90 = fit.error_quantiles(table[~table.fitted].log_error)
    metrics = ProbeMetrics(
        error_median=median,
        error_p90=p90,
        quantize_values_per_s=quantize,
        update_values_per_s=update,
        **{row.parameter.removesuffix(".0").replace(".", "_"): row.value for row in found.table().itertuples()},
    )
    return Probed(metrics, table, machine)


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
