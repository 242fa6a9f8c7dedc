"""Probe of a network: which cases, and from the ranks' seconds to a table, a fit and its error on sizes that were not fitted."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from repro.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.experiments._probe_ranks import Case, Probe
    from repro.scaling import Machine
    from repro.scaling.fit import Fit
    from repro.topology import Topology


@dataclass(frozen=True, eq=False)
class Probed:
    """Fit to every second size, the table with predictions for all, and values per second of a rank while all ranks share the processors."""

    fit: "Fit"
    table: "pd.DataFrame"
    quantize_values_per_s: float
    update_values_per_s: float

    def machine(self, topology: "Topology", native: bool) -> "Machine":
        """The probed machine, for `repro.scaling` with measured compute."""
        from repro.scaling import Machine
        from repro.scaling.step import UPDATE_BYTES

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
    def metrics(self) -> dict[str, Metric]:
        """Fitted parameters, and the error on sizes that were not fitted."""
        from repro.scaling.fit import error_quantiles

        held_out = self.table[~self.table.fitted].log_error
        median, p90 = error_quantiles(held_out)
        found = {
            "error_median": Metric(value=median, unit="1"),
            "error_p90": Metric(value=p90, unit="1"),
            "quantize_values_per_s": Metric(value=self.quantize_values_per_s, unit="1/s"),
            "update_values_per_s": Metric(value=self.update_values_per_s, unit="1/s"),
        }
        for row in self.fit.table().itertuples():
            name, unit = row.parameter.removesuffix(".0").replace(".", "_"), "s"
            found[name] = Metric(value=row.value, unit="bytes/s" if "bytes" in name else unit)
        return found


PARAMETERS = (
    *("overhead_s", "reduce_bytes_per_s", "host_bytes_per_s"),
    *(f"{level}_{what}" for level in ("package", "node", "cluster") for what in ("latency_s", "bytes_per_s")),
)
REPORTS = frozenset({"error_median", "error_p90", "quantize_values_per_s", "update_values_per_s", *PARAMETERS})


def _makespan(seconds: "Sequence") -> "np.ndarray | float":
    """[ranks, .., repeats] to [..]: anything lasts until its slowest rank is done; the median over the repeats."""
    return np.median(np.max(seconds, axis=0), axis=-1)


def fitted(
    topology: "Topology", cases: "Sequence[Case]", probes: "Sequence[Probe]", native: bool, host: bool
) -> Probed:
    """From what all ranks measured. `native`: the backend's collectives, rings; else those of `repro.comm`. `host`: all ranks share
    the processors of one machine."""
    import pandas as pd

    from repro.experiments import _probe_ranks
    from repro.scaling import fit as fitting

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
    model = fitting.Model(
        levels=topology.names,
        algorithms={"ring": ("ring",), "direct": ("direct",)},
        reduces=True,
        host=host,
    )
    found = fitting.fit(table[every_second], model)
    return Probed(
        found,
        fitting.predict(found, table).assign(fitted=every_second.to_numpy()),
        *(
            _probe_ranks.VALUES / _makespan([getattr(probe, name) for probe in probes])
            for name in ("quantize_s", "update_s")
        ),
    )
