"""Fused decoding beside the servers of others, on the same requests: the analogue of Flover against TensorRT-LLM."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Bytes, Experiment, Number, Point, Ratio, Seconds, TokensPerSecond, metrics, prefixed
from repro.experiments.flover_serving import ServingPoint
from repro.flover import paper

EngineName = Literal[
    *("fused", "serial"),
    *("vllm_compiled", "vllm_eager", "vllm_zentorch_compiled", "vllm_zentorch_eager"),
    *("transformers_continuous", "transformers_static", "llama_cpp"),
]


class PeersPoint(Point):
    """One server, and the paper's requests: prompts of 8 tokens, answers of 512 (uniform: 128 to `longest`), scaled.
    `fused` in place of another's server is the placebo: what the comparison shows where there is no difference."""

    engine: EngineName = "fused"
    requests: int = Field(32, ge=1, le=64, description="all may run at once; llama.cpp takes up to 64")
    workload: Literal["fixed", "uniform"] = "fixed"
    length_scale: float = Field(0.125, gt=0, description="factor on answer lengths")
    longest: int = Field(paper.TOKENS, ge=paper.SHORTEST, description="uniform: longest answer, before scaling")
    interval_t1: float = Field(0.0, ge=0, description="between arrivals, in times of a lone request; 0: all at once")
    model: Literal["smollm2-135m", "random-40m", "random-110m", "random-1b"] = "smollm2-135m"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def contradictions(self) -> Iterator[str]:
        if self.workload == "fixed" and self.longest != paper.TOKENS:
            yield f"longest is {self.longest} in the workload fixed, whose answers are equal: allowed {paper.TOKENS}"

    @property
    def served(self) -> ServingPoint:
        """The same requests as a point of `flover_serving` has them."""
        shared = ("requests", "workload", "length_scale", "longest", "interval_t1", "model", "dtype", "seed")
        return ServingPoint(interval_s=0.0, **{name: getattr(self, name) for name in shared})

    @property
    def label(self) -> str:
        model = f"-{self.model}" if self.model != "smollm2-135m" else ""
        lengths = f"{self.longest}" if self.workload == "uniform" else ""
        return f"{self.engine}{model}-{self.workload}{lengths}-n{self.requests}-{self.interval_t1:g}T1-{self.dtype}"


class Served(
    metrics(Seconds, "total_seconds", "latency_mean", "latency_p50", "latency_p99"),
    metrics(Seconds | None, "ttft_mean", "ttft_p99"),
):
    """Of one pass over the requests. `peak_bytes`: most resident memory of the server's processes while it serves, its
    weights included; None where the system does not tell. No `ttft` where tokens are handed out with the last only."""

    tokens_per_s: TokensPerSecond
    peak_bytes: Bytes | None = None
    load_seconds: Seconds


class PeersMetrics(Served, prefixed("fused_", Served)):
    """The point's engine, and `fused_*`: this package's on the same requests, mean of a pass before and one after.

    `fused_drift`: second pass ÷ first in total time, which is 1 on a steady machine. `others_fraction`: share of the
    cores' time that other programs took meanwhile. `tokens_*`: against the first pass of the fused engine."""

    fused_drift: Ratio
    others_fraction: Number
    single_request_seconds: Seconds
    mean_interval_seconds: Seconds
    tokens_equal_fraction: Number
    tokens_before_difference: Number


EXPERIMENT = Experiment(
    PeersPoint, PeersMetrics, conditions=("weights", "threads", "version", "scales", "order"), timeout_s=1200
)
