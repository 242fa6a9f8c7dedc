"""What the network of this machine or allocation does: times of gathers and reductions over every level, and the
latency and rate of each that they amount to."""

from collections.abc import Iterator

from pydantic import Field

from repro.experiments.base import BytesPerSecond, Experiment, Number, PerSecond, Seconds, metrics
from repro.experiments.common.ranks import LEVELS, OnRanks


class FabricProbe(OnRanks):
    """The rates are those of the emulated network, for machines that have one: it is probed at these and at four times them."""

    largest_kib: int = Field(1024, ge=64, description="largest tensor; four smaller ones, a quarter each time")
    repeats: int = Field(5, ge=1)

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.ranks == 1:
            yield "nodes, packages and gcds are all 1, which leaves no link to probe; allowed: one of them larger"

    @property
    def label(self) -> str:
        return f"{self.shape_label}-{self.cluster_mbit_s:g}mbit{self.fabric_label}"


class ProbeMetrics(
    metrics(Number, "error_median", "error_p90"),
    metrics(PerSecond, "quantize_values_per_s", "update_values_per_s"),
    metrics(Seconds | None, "overhead_s", *(f"{level}_latency_s" for level in LEVELS)),
    metrics(BytesPerSecond | None, *(f"{which}_bytes_per_s" for which in ("reduce", "host", *LEVELS))),
):
    """Errors on sizes that were not fitted; values per second of a rank while all ranks share the processors; fitted
    parameters. Those of a level with one member are where the fit began, since no time depends on them."""


EXPERIMENT = Experiment(FabricProbe, ProbeMetrics, conditions=("fabric",), timeout_s=900)
