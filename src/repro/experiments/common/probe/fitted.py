"""From the ranks' seconds to a table, a fit, and its error on sizes that were not fitted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from repro.experiments.common.probe import ProbeMetrics
from repro.experiments.common.probe.ranks import VALUES, Case, Probe
from repro.scaling import Machine, fit
from repro.scaling.step import UPDATE_BYTES
from repro.topology import Topology


@dataclass(frozen=True, eq=False)
class Probed:
    """Fit to every second size, table with predictions for all, and values per second of a rank while all ranks are
    busy."""

    fit: fit.Fit
    table: pd.DataFrame
    quantize_values_per_s: float
    update_values_per_s: float

    def machine(self, topology: Topology, native: bool) -> Machine:
        """The probed machine, for `repro.scaling` with measured compute."""
        return Machine(
            network=self.fit.network(*(level.size for level in topology.levels)),
            flops_per_s=np.inf,
            hbm_bytes_per_s=UPDATE_BYTES * self.update_values_per_s,
            launch_s=0.0,
            overlap=0.0,  # compute and messages share the processors
            quantize_values_per_s=self.quantize_values_per_s,
            native=native,
        )

    @property
    def metrics(self) -> ProbeMetrics:
        """Fitted parameters, and the error on sizes that were not fitted."""
        median, p90 = fit.error_quantiles(self.table[~self.table.fitted].log_error)
        return ProbeMetrics(
            error_median=median,
            error_p90=p90,
            quantize_values_per_s=self.quantize_values_per_s,
            update_values_per_s=self.update_values_per_s,
            **{row.parameter.removesuffix(".0").replace(".", "_"): row.value for row in self.fit.table().itertuples()},
        )


def fitted(topology: Topology, cases: Sequence[Case], probes: Sequence[Probe], native: bool, host: bool) -> Probed:
    """From what all ranks measured. `native`: the backend's collectives, rings; else those of `repro.comm`. `host`: all
    ranks share the processors of one machine."""
    seconds = _makespan([probe.seconds for probe in probes])
    sizes = tuple(level.size for level in topology.levels)
    rows = [
        {
            "source": "probe",
            "collective": case.collective,
            "algorithm": "ring" if native or len(case.levels) > 1 else "direct",
            "sizes": sizes,
            "hop": case.levels,
            "nbytes": case.nbytes,
            "seconds": float(found),
        }
        for case, found in zip(cases, seconds, strict=True)
    ]
    table = pd.DataFrame(rows)
    every_second = table.groupby(["collective", "hop"], sort=False).cumcount() % 2 == 0
    model = fit.Model(
        levels=topology.names, algorithms={"ring": ("ring",), "direct": ("direct",)}, reduces=True, host=host
    )
    found = fit.fit(table[every_second], model)
    return Probed(
        found,
        fit.predict(found, table).assign(fitted=every_second.to_numpy()),
        *(VALUES / _makespan([getattr(probe, name) for probe in probes]) for name in ("quantize_s", "update_s")),
    )


def _makespan(seconds: Sequence) -> np.ndarray | float:
    """[ranks, .., repeats] to [..]: anything lasts until its slowest rank is done; the median over the repeats."""
    return np.median(np.max(seconds, axis=0), axis=-1)
