"""Serving a language model: fused decoding against serial, static and dynamic batching and concurrent instances."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Bytes, Experiment, Number, Point, Seconds, metrics
from repro.experiments.common.names import Layout
from repro.experiments.common.serving import WINDOW, ServedMetrics
from repro.flover import paper

ModelName = Literal["smollm2-135m", "random-40m", "random-110m", "random-1b", "random-7b", "random-13b"]


class ServingPoint(Point):
    """Engine, workload and its scales. The Azure trace has lengths and gaps, ShareGPT lengths only (Poisson arrivals);
    the paper's regular workloads have prompts of 8 tokens and answers of 512 (uniform: 128 to `longest`), scaled.
    Fields that end in `_t1` count in the time of a lone request, the median of several that are measured before."""

    engine: Literal["fused", "serial", "static", "dynamic", "instances"] = "fused"
    requests: int = Field(32, ge=1)
    workload: Literal["azure", "sharegpt", "fixed", "poisson", "uniform"] = "azure"
    trace_start: int = Field(0, ge=0, description="azure, sharegpt: first row of the slice")
    time_scale: float = Field(0.1, gt=0, description="azure: factor on the gaps between arrivals")
    length_scale: float = Field(0.25, gt=0, description="factor on prompt and answer lengths")
    max_prompt_tokens: int = Field(64, ge=1, description="azure, sharegpt: longer prompts are cut to this")
    max_output_tokens: int = Field(128, ge=1, description="azure, sharegpt: longer answers are cut to this")
    interval_s: float = Field(0.2, ge=0, description="all but azure: (mean) gap between arrivals")
    interval_t1: float = Field(0.0, ge=0, description="the same in lone requests' times; 0: interval_s holds")
    longest: int = Field(512, ge=paper.SHORTEST, description="uniform: longest answer, before scaling")
    max_slots: int = Field(32, ge=1, description="fused: requests decoded at once")
    batch_size: int = Field(8, ge=1, description="static, dynamic: most requests per batch")
    window_s: float = Field(0.0, ge=0, description=WINDOW)
    window_t1: float = Field(0.0, ge=0, description="the same in lone requests' times; 0: window_s holds")
    instances: int = Field(0, ge=0, description="instances: processes, each with the model; 0 = one per request")
    instance_threads: int = Field(0, ge=0, description="instances: of each; 0 = all cores, as each has the whole GPU")
    admit_per_iteration: int = Field(0, ge=0, description="fused: 0 = as many as fit; the authors' code: 1")
    layout: Layout = Field("window", description="fused")
    prefill_tokens: int = Field(0, ge=0, description="fused: prompt tokens per iteration; 0 = whole prompts")
    model: ModelName = "smollm2-135m"
    device: Literal["cpu", "cuda"] = Field("cpu", description="cuda: ROCm as well; skipped where there is no GPU")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="float16: on a GPU only")
    check_tokens: bool = Field(True, description="compare the tokens of all requests, or of 4, with lone runs")
    predict: bool = Field(False, description="measure iterations and prompts before, and predict by the queue model")

    def contradictions(self) -> Iterator[str]:
        windows = f"window_s is {self.window_s} and window_t1 {self.window_t1}"
        if self.engine != "dynamic" and (self.window_s or self.window_t1):
            yield f"{windows}: only the engine dynamic has a window"
        if self.window_s and self.window_t1:
            yield f"{windows}: one of them must be 0"
        if (self.instances or self.instance_threads) and self.engine != "instances":
            found = f"instances is {self.instances}, instance_threads {self.instance_threads}"
            yield f"{found}: only for the engine instances"
        own = {name: getattr(self, name) for name in ("admit_per_iteration", "layout", "prefill_tokens")}
        for name, value in own.items():
            if self.engine != "fused" and value != type(self).model_fields[name].default:
                yield f"{name} is {value}: only for the engine fused"
        if self.predict and self.instance_threads:
            yield f"predict with instance_threads {self.instance_threads}: lone iterations are timed on all cores"
        if self.interval_t1 and self.workload == "azure":
            yield f"interval_t1 is {self.interval_t1}: the trace azure has its own gaps, scaled by time_scale"
        if self.dtype == "float16" and self.device == "cpu":
            yield "dtype is float16 on the device cpu: allowed float32, bfloat16"
        if self.predict and self.layout in ("fixed", "paged"):
            yield f"predict with layout {self.layout}: the model has neither dead slots nor tables of blocks"

    @property
    def label(self) -> str:
        engine = f"{self.engine}{self.batch_size}" if self.engine in ("static", "dynamic") else self.engine
        if self.engine == "dynamic":
            engine += f"-{self.window_t1:g}T1" if self.window_t1 else f"-{self.window_s:g}s"
        engine += f"{self.instances}" if self.instances else ""
        engine += f"-threads{self.instance_threads}" if self.instance_threads else ""
        engine += f"-admit{self.admit_per_iteration}" if self.engine == "fused" and self.admit_per_iteration else ""
        if self.engine == "fused":
            engine += f"-{self.layout}" if self.layout != "window" else ""
            engine += f"-prefill{self.prefill_tokens}" if self.prefill_tokens else ""
        lengths = f"{self.longest}" if self.workload == "uniform" else ""
        engine += "-predicted" if self.predict else ""
        engine += f"-{self.model}" if self.model != "smollm2-135m" else ""
        engine += "-gpu" if self.device == "cuda" else ""
        return f"{engine}-{self.workload}{lengths}-n{self.requests}-{self.dtype}"


_PREDICTED = ("total_seconds", "latency_mean", "latency_p99")


class ServingMetrics(
    ServedMetrics,
    metrics(Seconds | None, *(f"predicted_{name}" for name in _PREDICTED)),
    metrics(Number | None, *(f"error_{name}" for name in _PREDICTED)),
    metrics(Number, *(f"tokens_{what}" for what in ("checked", "equal_fraction", "equal_or_tied_fraction"))),
):
    """`predicted_*` and `error_*`: what the queue model says before the run, and predicted ÷ measured - 1.
    `largest_gap`: between the logits of the tokens at which an answer and its lone run first differ; 0 where no two
    tokens do. `fastest_pass_seconds`, `slowest_pass_seconds`: of all passes over the requests. All other metrics are of
    the one whose time is the median; with a single pass the three are the same."""

    latency_first: Seconds
    single_request_seconds: Seconds
    largest_gap: Number | None = None  # older records have none
    mean_interval_seconds: Seconds
    fastest_pass_seconds: Seconds | None = None  # older records have none, and one pass
    slowest_pass_seconds: Seconds | None = None
    window_seconds: Seconds | None = None
    instance_bytes: Bytes | None = None
    instances_bytes: Bytes | None = None


EXPERIMENT = Experiment(
    ServingPoint, ServingMetrics, conditions=("weights", "threads", "linear", "kernels", "scales", "lone_reference")
)
