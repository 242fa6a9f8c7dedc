"""Does the collective model hold? Fitted to one part of published measurements, compared with the other."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, metrics

PARTS = ("fitted", "held_out")


class ScalingNetwork(Point):
    """`source`: NCCL on one or two DGX A100 (microsoft/vidur), Cray MPICH on LUMI's Slingshot-11 (HLC-Lab/pico), or NCCL
    or RCCL on all GPUs of nodes of Alps, Leonardo and LUMI (Blink).
    `split`: what is held out (`repro.scaling.published`)."""

    source: Literal["a100_node", "a100_dgx", "slingshot11", "alps", "leonardo", "lumi"] = "slingshot11"
    split: Literal["ranks", "sizes", "machine", "scenario"] = "ranks"
    protocols: int = Field(3, ge=1, le=3, description="at most so many, each for a range of message sizes; not of NCCL")

    @property
    def label(self) -> str:
        return f"{self.source}-{self.split}-{self.protocols}p"


_OF_PART = ("error_median", "error_p90", "error_median_large", "error_p90_large", "rows")
_BAND = ("covered", "covered_large", "half_band", "half_band_large")


class ScalingNetworkMetrics(
    metrics(Number | None, *(f"fitted_{name}" for name in _OF_PART)),
    metrics(Number, *(f"held_out_{name}" for name in (*_OF_PART, "within_40", "bias", *_BAND))),
):
    """Relative errors of the fitted and the held-out rows: a factor of 1.2, too much or too little, is 0.2. `*_large`:
    of messages as large as training's.

    within_40          share of the held-out rows with an error of at most 0.4
    bias               their median, with its sign: above 0 is too slow
    covered            share of them inside the band, which is to hold 90 %
    half_band          median of half its width, as an error
    scatter_*          of each measurement from its neighbours in size, where sizes are dense: no smooth model does better
    left_out_*         of the shapes left out when the switches of the protocols were chosen
    one_protocol_*     the same with one protocol for all sizes
    """

    scatter_median: Number | None = None
    scatter_p90: Number | None = None
    left_out_error_median: Number | None = None
    one_protocol_error_median: Number | None = None


EXPERIMENT = Experiment(ScalingNetwork, ScalingNetworkMetrics, conditions=("switches_bytes", "parameters"), timed=False)
