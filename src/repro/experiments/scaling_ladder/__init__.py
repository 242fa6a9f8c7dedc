"""What would have to be true: which assumptions give the four numbers of hierarchical ZeRO++, one by one and together."""

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, metrics
from repro.experiments.scaling_train import RATIOS

NUMBERS = (*RATIOS, "efficiency")
MICRO_BATCHES = (1, 4, 16)
SHARES = (*NUMBERS, "all", *(f"all_{count}" for count in MICRO_BATCHES))


class ScalingLadder(Point):
    """48 nodes of Frontier, 20 billion parameters, as `repro.scaling.ladder` has them."""

    draws: int = Field(2000, ge=2, description="of every combination of rings, tokens and micro-batches")

    @property
    def label(self) -> str:
        return f"frontier-48n-gpt-20b-{self.draws}draws"


class ScalingLadderMetrics(
    metrics(Number, *(f"{at}_{name}" for at in ("start", "end") for name in NUMBERS)),
    metrics(Number, *(f"single_{name}" for name in NUMBERS)),
    metrics(Number, *(f"share_{name}" for name in SHARES)),
):
    """`start_*`: the paper's numbers in our setting; `end_*`: at the end of the path. `single_*`: how many of the
    `changes` reach a number alone. `share_*`: of the draws that reach it within the claim's tolerance; `share_all`: all
    four at once, and with so many micro-batches."""

    changes: Number
    draws: Number


EXPERIMENT = Experiment(ScalingLadder, ScalingLadderMetrics, conditions=("priors",), timed=False)
