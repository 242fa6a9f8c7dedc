"""The paper's tables by the queue model: total time (Fig. 4a), iterations and overlap (v1 Fig. 8), progress."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, Seconds, metrics
from repro.experiments.common.serving import WINDOW

WINDOWS = ("dynamic", "dynamic_concurrent")  # policies that have one


class QueuePoint(Point):
    """`table`: fig4a and progress have arrivals at a fixed interval, fig8 Poisson arrivals of mean gap `interval_ms`.
    `policy`: dynamic runs one batch at a time; dynamic_concurrent and instances share the machine evenly."""

    table: Literal["fig4a", "fig8", "progress"] = "fig8"
    policy: Literal["fused", "serial", "dynamic", "dynamic_concurrent", "instances"] = "fused"
    window_s: float = Field(0.0, ge=0, description=WINDOW)
    requests: int = Field(32, ge=1)
    interval_ms: float = Field(500.0, ge=0)
    single_request_s: float = Field(5.8, gt=0, description="T1: a request alone on the paper's hardware")
    iterations: int = Field(512, ge=1, description="output tokens of every request")
    batch_cost: float = Field(0.02, ge=0, description="c in t_iter(b) = t1 (1 + c (b - 1))")
    admit_per_iteration: int = Field(1, ge=0, description="fused: newcomers per token boundary; 0: as many as arrived")
    seeds: int = Field(200, ge=1, description="draws of the arrivals, averaged (fig8 only)")

    def contradictions(self) -> Iterator[str]:
        if self.window_s and self.policy not in WINDOWS:
            yield f"window_s is {self.window_s}: only the policies {' and '.join(WINDOWS)} have one"

    @property
    def label(self) -> str:
        policy = "" if self.policy == "fused" else f"-{self.policy}"
        policy += f"{self.window_s:g}s" if self.policy in WINDOWS else ""
        rates = f"n{self.requests}-{self.interval_ms:g}ms-T{self.single_request_s:g}s-c{self.batch_cost:g}"
        return f"{self.table}{policy}-{rates}"


_SECONDS = ("total_seconds", "serial_seconds")
_NUMBERS = ("speedup_vs_serial", "iterations", "overlap_fraction", "latency_ratio", "first_latency_ratio")


class QueueMetrics(
    metrics(Seconds, *_SECONDS, *(f"{name}_sd" for name in _SECONDS)),
    metrics(Number, *_NUMBERS, *(f"{name}_sd" for name in _NUMBERS)),
):
    """Mean and standard deviation over the draws. A fixed interval has a single draw, and its deviations are 0."""


EXPERIMENT = Experiment(QueuePoint, QueueMetrics, conditions=("reference",), timeout_s=120, timed=False)
