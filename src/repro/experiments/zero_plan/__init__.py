"""Which plan for which machine and model: predicted step time and memory of every ZeRO plan, from the arithmetic of
`repro.zero`.

Modelled throughout: bytes over rates, one exchange after the other, and no overlap with compute. What it predicts for
the emulated machine is compared with measured steps in the notebook.
"""

from typing import Literal

from pydantic import Field

from repro.experiments.base import BillionParameters, Experiment, Gigabytes, Number, Point, Seconds, metrics
from repro.experiments.common.names import NAMED


class ZeroPlan(Point):
    """A machine, a model, a batch. Rates of `frontier` are those of the OLCF user guide with all GCDs busy; `a100`: 4
    GPUs a node, NVLink 300 GB/s, two HDR200 rails; `emulated`: the shaped network of zero_train."""

    machine: Literal["frontier", "a100", "emulated"] = "frontier"
    nodes: int = Field(48, ge=1)
    model: Literal["gpt-20b", "gpt-10b", "small"] = "gpt-20b"
    seq_len: int = Field(2048, ge=1)
    micro_batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)
    memory_gb: float = Field(64.0, gt=0, description="per rank")
    sustained_tflops: float = Field(76.0, gt=0, description="of one rank in forward and backward; 40 % of a GCD's peak")

    @property
    def label(self) -> str:
        return f"{self.machine}-{self.nodes}n-{self.model}-{self.accumulation}mb"


class ZeroPlanMetrics(
    metrics(Seconds, *(f"step_seconds_{name}" for name in NAMED)),
    metrics(Gigabytes, *(f"gigabytes_{name}" for name in NAMED)),
    metrics(BillionParameters, *(f"largest_{name}" for name in NAMED)),
):
    """Of the named plans: predicted step, memory of a rank, largest model that fits. `plans`: all candidates."""

    parameters: Number
    compute_seconds: Seconds
    plans: Number
    plans_that_fit: Number
    step_seconds_best: Seconds | None = None


EXPERIMENT = Experiment(ZeroPlan, ZeroPlanMetrics, conditions=("best",), timed=False)
