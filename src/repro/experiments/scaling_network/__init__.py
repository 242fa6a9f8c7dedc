"""Does the collective model hold? Fitted to published measurements of small machines, compared with larger ones."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Metrics, Number, Point


class ScalingNetwork(Point):
    """`source`: NCCL on DGX A100 (microsoft/vidur), or Cray MPICH on LUMI's Slingshot-11 (HLC-Lab/pico)."""

    source: Literal["a100_dgx", "slingshot11"] = "slingshot11"
    protocols: int = Field(3, ge=1, le=3, description="at most so many, each for a range of message sizes")

    @property
    def label(self) -> str:
        return f"{self.source}-{self.protocols}p"


class ScalingNetworkMetrics(Metrics):
    """Logarithmic errors of the fitted and of the held-out rows. `*_large`: of messages of the size that training
    sends."""

    fitted_error_median: Number
    fitted_error_p90: Number
    fitted_error_median_large: Number
    fitted_error_p90_large: Number
    fitted_rows: Number
    held_out_error_median: Number
    held_out_error_p90: Number
    held_out_error_median_large: Number
    held_out_error_p90_large: Number
    held_out_rows: Number
    left_out_error_median: Number
    one_protocol_error_median: Number


EXPERIMENT = Experiment(
    parameters=ScalingNetwork, metrics=ScalingNetworkMetrics, conditions=("switches_bytes", "parameters"), timed=False
)
