"""Hierarchical ZeRO++ at the paper's sizes and beyond: predicted steps, and which unknown decides a ratio of plans."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Gigabytes, Number, Point, Ratio, Seconds, Tflops, bands, metrics
from repro.experiments.common.names import Hardware
from repro.experiments.zero_train import ZeroTrain

PLANS = ("ddp", "zero3", "zeropp", "mics", "hierarchical", "hierarchical_fp")
# Pairs whose ratio the paper reports: how many times as fast the first is.
RATIOS = {
    "hierarchical_over_zeropp": ("hierarchical", "zeropp"),
    "zeropp_over_zero3": ("zeropp", "zero3"),
    "hierarchical_over_zero3": ("hierarchical", "zero3"),
}


class ScalingTrain(Point):
    """A machine, a model, a batch; `frontier-rccl` is a scenario of its own (one ring, slow starts)."""

    hardware: Hardware = "frontier"
    nodes: int = Field(48, ge=1)
    model: Literal["gpt-20b", "gpt-10b"] = "gpt-20b"
    seq_len: int = Field(2048, ge=1)
    micro_batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)
    draws: int = Field(
        4000, ge=2, description="of the machine's uncertain parameters, and of what is assumed of the engine"
    )

    @property
    def label(self) -> str:
        return f"{self.hardware}-{self.nodes}n-{self.model}-{self.micro_batch}x{self.seq_len}x{self.accumulation}"


class ScalingTrainMetrics(
    bands(Tflops, *(f"tflops_{plan}" for plan in PLANS)),
    bands(Seconds, *(f"step_seconds_{plan}" for plan in PLANS)),
    bands(Number | None, *(f"efficiency_{plan}" for plan in PLANS)),
    bands(Ratio, *RATIOS),
    metrics(Gigabytes, *(f"gigabytes_{plan}" for plan in PLANS)),
    metrics(Number, *(f"fits_{plan}" for plan in PLANS)),
):
    """Of every plan; the efficiency is against the fewest nodes that hold it, of a plan that fits. The ratios are the
    paper's; their bands also hold the model's own error, as measured by scaling_validation."""

    ranks: Number


def _train_seconds(point: ZeroTrain, hardware: str) -> float | None:
    from repro.experiments.scaling_train.run import train_seconds

    return train_seconds(point, hardware)


EXPERIMENT = Experiment(
    ScalingTrain,
    ScalingTrainMetrics,
    conditions=tuple(f"critical_{plan}" for plan in PLANS),
    timed=False,
    predicts={"zero_train": _train_seconds},
)
