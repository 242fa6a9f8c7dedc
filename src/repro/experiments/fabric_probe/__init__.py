"""What the network of this machine or allocation does: times of gathers and reductions over every level, and the
latency and rate of each that they amount to."""

from pydantic import Field

from repro.experiments.base import Experiment
from repro.experiments.common.probe import ProbeMetrics
from repro.experiments.common.ranks import OnRanks

TIMEOUT_S = 900.0


class FabricProbe(OnRanks):
    """The rates are those of the emulated network, for machines that have one."""

    largest_kib: int = Field(1024, ge=64, description="largest tensor; four smaller ones, a quarter each time")
    repeats: int = Field(5, ge=1)

    @property
    def label(self) -> str:
        return f"{self.shape_label}-{self.cluster_mbit_s:g}mbit{self.fabric_label}"


EXPERIMENT = Experiment(parameters=FabricProbe, metrics=ProbeMetrics, conditions=("fabric",), timeout_s=TIMEOUT_S)
