"""Flover's Fig. 4(a) from first principles: total time of the paper's requests on A100s, predicted from sizes and rates alone."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

if TYPE_CHECKING:
    from repro.scaling.serving import Dense

# What serves: the paper's fusion; one after another; and FasterTransformer's instances, which share the GPU.
POLICIES = ("fused", "serial", "instances")


class ScalingServing(Point):
    """512 tokens a request, of which 8 are the prompt, as in the authors' configuration."""

    model: Literal["gpt-j-6b", "llama-13b", "llama-33b", "llama-65b", "llama-65b-released"] = "gpt-j-6b"
    requests: int = Field(32, ge=1)
    interval_ms: float = Field(500.0, ge=0)
    draws: int = Field(64, ge=2, description="of the machine's uncertain parameters")

    @property
    def dense(self) -> "Dense":
        """Sizes of the model."""
        from repro.scaling.serving import PAPER_GPUS

        return next(model for model in PAPER_GPUS if model.name == self.model)


def run(point: ScalingServing) -> Outcome:
    """Bands of the totals and of the speedups; the series has 1, 2, 4 … `requests` requests."""
    import pandas as pd

    from repro.scaling import serving
    from repro.scaling.whatif import banded

    machine = serving.machine_of(serving.PAPER_GPUS[point.dense], draws=point.draws, seed=point.seed)
    rows, last = [], {}
    for requests in sorted({2**i for i in range(point.requests.bit_length())} | {point.requests}):
        last = {name: _total(point, name, machine, requests) for name in POLICIES}
        bands = [banded(f"seconds_{name}", total) for name, total in last.items()]
        rows.append({"requests": requests, **{key: value for band in bands for key, value in band.items()}})
    metrics = {}
    for name, total in last.items():
        metrics |= {key: Metric(value=value, unit="s") for key, value in banded(f"seconds_{name}", total).items()}
    for name in POLICIES[1:]:
        ratio = banded(f"speedup_over_{name}", last[name] / last["fused"])
        metrics |= {key: Metric(value=value, unit="×") for key, value in ratio.items()}
    alone = _total(point, "serial", machine, 1)
    metrics |= {key: Metric(value=value, unit="s") for key, value in banded("single_request_s", alone).items()}
    gpus = serving.PAPER_GPUS[point.dense]
    return Outcome(metrics, "modelled", series=pd.DataFrame(rows), topology=f"{gpus} A100-80GB (arithmetic)")


def _total(point: ScalingServing, policy: str, machine: "object", requests: int) -> "object":
    from repro.flover import queueing
    from repro.scaling import serving

    policies = {
        # As the authors' code: one newcomer per token boundary, prompts on a stream of their own.
        "fused": queueing.Fused(admit_per_iteration=1, prefill_apart=True),
        "serial": queueing.Fused(slots=1),
        "instances": queueing.Instances(),
    }
    return serving.total_seconds(point.dense, machine, policies[policy], requests, point.interval_ms / 1000)


def label(point: ScalingServing) -> str:
    """Short name of a point for its record file."""
    return f"{point.model}-n{point.requests}-{point.interval_ms:g}ms"


_BANDS = [
    *(f"seconds_{name}" for name in POLICIES),
    *(f"speedup_over_{name}" for name in POLICIES[1:]),
    "single_request_s",
]
EXPERIMENT = Experiment(
    summary="Total time of the paper's requests, fused and not, predicted from the sizes of model and GPU",
    parameters=ScalingServing,
    run=run,
    label=label,
    reports=frozenset(f"{name}{end}" for name in _BANDS for end in ("_low", "", "_high")),
    timed=False,
)
