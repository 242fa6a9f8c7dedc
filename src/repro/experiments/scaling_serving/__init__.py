"""Flover's Fig. 4(a) from first principles: total time of the paper's requests, predicted from sizes and rates."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Point, Ratio, Seconds, bands
from repro.flover import paper

# What serves: the paper's fusion; one after another; and FasterTransformer's instances, which share the GPU.
POLICIES = ("fused", "serial", "instances")


class ScalingServing(Point):
    """512 tokens a request, of which 8 are the prompt, as in the authors' configuration."""

    model: Literal["gpt-j-6b", "llama-13b", "llama-33b", "llama-65b", "llama-65b-released"] = "gpt-j-6b"
    requests: int = Field(paper.REQUESTS, ge=1)
    interval_ms: float = Field(1000 * paper.INTERVAL_S, ge=0)
    draws: int = Field(1000, ge=2, description="of the machine's uncertain parameters")

    @property
    def label(self) -> str:
        return f"{self.model}-n{self.requests}-{self.interval_ms:g}ms"


class ScalingServingMetrics(
    bands(Seconds, *(f"seconds_{name}" for name in POLICIES), "single_request_s"),
    bands(Ratio, *(f"speedup_over_{name}" for name in POLICIES[1:])),
):
    """Total times of all requests, the fused server's speed-ups, and the time of a request alone."""


EXPERIMENT = Experiment(ScalingServing, ScalingServingMetrics, timed=False)
