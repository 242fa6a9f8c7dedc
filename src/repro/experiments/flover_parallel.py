"""Fused decoding over tensor-parallel ranks, in a node or between nodes, with the paper's reordering or without."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from repro.experiments import _flover_metrics, _flover_workload
from repro.experiments.base import Experiment, Outcome, Point, Shape
from repro.records.record import Metric

if TYPE_CHECKING:
    from repro.topology import Topology

CHECKED = 4  # requests whose tokens one process decodes again
TIMEOUT_S = 900.0


class ParallelPoint(Point):
    """Ranks: nodes * packages * gcds. A LLaMA model with random weights; answers of 128 to `longest` tokens, times `length_scale`, and
    prompts of 8."""

    nodes: int = Field(1, ge=1)
    packages: int = Field(2, ge=1, description="GPU packages per node")
    gcds: int = Field(1, ge=1, description="ranks per package")
    layout: Literal["window", "fixed", "shift", "last", "paged"] = Field(
        "window", description="what moves when a request leaves; window is the paper's reordering, fixed none"
    )
    layers: int = Field(8, ge=1)
    width: int = Field(256, ge=1)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(0, ge=0, description="0: as many as heads")
    ffn: int = Field(688, ge=1)
    vocab: int = Field(4096, ge=2)
    dtype: Literal["float32", "bfloat16"] = "float32"
    requests: int = Field(16, ge=1)
    interval_s: float = Field(0.02, ge=0, description="between arrivals")
    longest: int = Field(512, ge=_flover_workload.PAPER_SHORTEST, description="longest answer, before scaling")
    length_scale: float = Field(0.125, gt=0, description="factor on answer lengths")
    max_slots: int = Field(32, ge=1, description="requests decoded at once")
    cluster_mbit_s: float = Field(50.0, gt=0)
    package_ratio: float = Field(16.0, gt=0)
    node_ratio: float = Field(4.0, gt=0)
    fabric: Literal["auto", "unshaped"] = "auto"

    @model_validator(mode="after")
    def _shared(self) -> "ParallelPoint":
        for name in ("heads", "kv_heads", "ffn"):
            if getattr(self, name) % self.ranks:
                raise ValueError(f"{name} is {getattr(self, name)}: {self.ranks} ranks cannot share it evenly")
        return self

    @property
    def ranks(self) -> int:
        return self.nodes * self.packages * self.gcds

    @property
    def topology(self) -> "Topology":
        """Sizes and rates of the levels."""
        from repro.topology import Level, Topology

        slow = self.cluster_mbit_s * 1e6 / 8
        return Topology(
            (
                Level("package", self.gcds, slow * self.package_ratio),
                Level("node", self.packages, slow * self.node_ratio),
                Level("cluster", self.nodes, slow),
            )
        )


def run(point: ParallelPoint) -> Outcome:
    """Serve on all ranks, compare their passes, and the tokens with those of one process."""
    from repro import launch
    from repro.experiments import _flover_ranks
    from repro.flover import workload
    from repro.launch import network

    with network.between(point.topology, point.fabric) as links:
        first, *others = launch.launch(
            *(_flover_ranks.serve, point.ranks, point),
            fabric=links.fabric,
            topology=point.topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    alone = _flover_ranks.alone(point, CHECKED)
    served = {generation.request.id: generation.tokens for generation in first.report.generations}
    values = workload.summary(first.report) | {
        "ranks_agree": float(all(other.digest == first.digest for other in others)),
        "tokens_equal_fraction": sum(served[g.request.id] == g.tokens for g in alone) / len(alone),
    }
    return Outcome(
        metrics={name: Metric(value=value, unit=_flover_metrics.unit(name)) for name, value in values.items()},
        evidence=links.evidence,
        conditions={"fabric": links.state, "requests_checked": str(len(alone))},
        topology=f"{point.nodes} nodes x {point.packages} packages x {point.gcds} ranks, {links.state}",
    )


def _label(point: ParallelPoint) -> str:
    shape = f"{point.nodes}x{point.packages}x{point.gcds}"
    end = "-unshaped" if point.fabric == "unshaped" else ""
    return f"{point.layout}-tp{shape}-n{point.requests}-uniform{point.longest}{end}"


REPORTS = {"ranks_agree", "tokens_equal_fraction", "fabric", "requests_checked"}
EXPERIMENT = Experiment(
    summary="Tensor-parallel fused decoding: in a node and between nodes, with reordering and without",
    parameters=ParallelPoint,
    run=run,
    label=_label,
    reports=_flover_metrics.SUMMARY | REPORTS,
    shape=lambda point: Shape(point.nodes, point.packages, point.gcds),
    timeout_s=TIMEOUT_S,
)
