"""Does the collective model hold? Fitted to published measurements of small machines, compared with larger ones."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, metrics

PARTS = ("fitted", "held_out")


class ScalingNetwork(Point):
    """`source`: NCCL on DGX A100 (microsoft/vidur), or Cray MPICH on LUMI's Slingshot-11 (HLC-Lab/pico)."""

    source: Literal["a100_dgx", "slingshot11"] = "slingshot11"
    protocols: int = Field(3, ge=1, le=3, description="at most so many, each for a range of message sizes")

    @property
    def label(self) -> str:
        return f"{self.source}-{self.protocols}p"


_OF_PART = ("error_median", "error_p90", "error_median_large", "error_p90_large", "rows")


class ScalingNetworkMetrics(metrics(Number, *(f"{part}_{name}" for part in PARTS for name in _OF_PART))):
    """Logarithmic errors of the fitted and the held-out rows. `*_large`: of messages as large as training's."""

    left_out_error_median: Number
    one_protocol_error_median: Number


EXPERIMENT = Experiment(ScalingNetwork, ScalingNetworkMetrics, conditions=("switches_bytes", "parameters"), timed=False)
