"""What if: the fastest ZeRO plan that fits, over networks and memories, or over models and numbers of ranks."""

from typing import Literal

from pydantic import Field

from repro.experiments.base import BillionParameters, Experiment, Number, Point, metrics
from repro.experiments.common.names import Hardware

PLANS = ("ddp", "zero1", "zero2", "zero3", "hpz", "zeropp", "mics", "hsdp", "hierarchical", "hierarchical_fp")


class ScalingMap(Point):
    """`over`: network_memory varies the links between nodes and a rank's memory, size_ranks the model and the nodes."""

    over: Literal["network_memory", "size_ranks"] = "network_memory"
    hardware: Hardware = "frontier"
    nodes: int = Field(48, ge=2, description="network_memory: of the machine; size_ranks: not used")
    billions: float = Field(20.0, gt=0, description="network_memory: 10⁹ parameters; size_ranks: not used")
    most_ranks: int = Field(32768, ge=8, description="size_ranks: the largest machine")
    micro_batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)

    @property
    def label(self) -> str:
        which = f"{self.billions:g}b-{self.nodes}n" if self.over == "network_memory" else f"to{self.most_ranks}"
        return f"{self.over}-{self.hardware}-{which}-{self.micro_batch}x{self.accumulation}"


class ScalingMapMetrics(
    metrics(Number, *(f"share_{plan}" for plan in PLANS)),
    metrics(BillionParameters, *(f"largest_{plan}" for plan in PLANS)),
):
    """`share_*`: of the cells in which the plan is the best that fits. `largest_*`: the largest model that fits,
    without activations, on `nodes` nodes (for size_ranks too). `crossover_factor`: the factor on the rate between
    nodes at which the hierarchical plan and ZeRO++ change places; None where they do not, and for size_ranks."""

    cells: Number
    crossover_factor: Number | None = None


EXPERIMENT = Experiment(ScalingMap, ScalingMapMetrics, timed=False)
