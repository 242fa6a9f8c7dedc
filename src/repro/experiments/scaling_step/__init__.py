"""Does the step model hold? Probe the network at every rate, calibrate the processors' work on three plans at one rate,
predict every plan at every rate, and compare with measured steps."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Ratio, metrics, prefixed
from repro.experiments.common.names import NAMED
from repro.experiments.common.ranks import Ranked
from repro.experiments.fabric_probe import ProbeMetrics
from repro.experiments.zero_train import WARM_UP, ZeroTrain

PAPER = ("ddp", "zero3", "zeropp", "hierarchical")
ERRORS = ("median", "p90", "worst")


class ScalingStep(Ranked):
    """The model and the network are those of zero_train. `rates`: between nodes, Mbit/s per rank with all ranks busy,
    separated by commas. The first is the one that is calibrated at."""

    plans: Literal["all", "paper"] = Field("all", description="paper: the plans that it compares, and DDP")
    rates: str = Field("25,12.5,50", pattern=r"^\d+(\.\d+)?(,\d+(\.\d+)?)*$")
    nodes: int = Field(2, ge=2, description="at least two: the plans differ in what leaves a node")
    accumulation: int = Field(1, ge=1, description="backward passes per step")
    steps: int = Field(5, ge=WARM_UP + 1)
    repeats: int = Field(5, ge=1, description="of each collective of the probe")

    def trainings(self, rate: float) -> list[ZeroTrain]:
        """What is trained at a rate, one after the other."""
        names = ("nodes", "packages", "gcds", "accumulation", "steps", "seed")
        same = {name: getattr(self, name) for name in names} | {"cluster_mbit_s": rate}
        return [ZeroTrain(plan=plan, **same) for plan in (NAMED if self.plans == "all" else PAPER)]

    @property
    def label(self) -> str:
        steps = f"{self.accumulation}x{self.steps}"
        return f"{self.plans}-{self.shape_label}-{steps}-{self.rates.replace(',', '_')}mbit"


class ScalingStepMetrics(
    prefixed("probe_", ProbeMetrics),
    metrics(Number, *(f"step_error_{what}{which}" for what in ERRORS for which in ("", "_probed_only"))),
    metrics(Ratio, *(f"factor_{name}" for name in ("message", "bytes", "memory"))),
):
    """Errors of the steps that were not calibrated with; `*_probed_only`: without the calibration. `first_plan_over_fastest`:
    measured step of the plan that is predicted to be fastest, over the fastest measured one, at the worst of the rates;
    None in records from before it was counted."""

    steps_within_15_percent: Number
    first_plan_over_fastest: Ratio | None = None


EXPERIMENT = Experiment(ScalingStep, ScalingStepMetrics, conditions=("fabric",), timeout_s=3600)
