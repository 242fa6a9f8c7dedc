"""Copies of hot experts in spare slots, and, for top-k routing, placing by whole tokens."""

from typing import Literal

from pydantic import Field, model_validator

from repro.experiments.base import Experiment, HopsPerToken, Metrics, Number, Point
from repro.experiments.common.traces import TraceName, experts, widest


class ServingPoint(Point):
    """Placed by training sequences, counted on held-out ones. `seed` splits them and seeds the searches."""

    trace: TraceName = "gptoss20b"
    top_k: int = Field(1, ge=1, description="experts per token and layer")
    gpus: int = Field(8, ge=1)
    gpus_per_node: int = Field(4, ge=1)
    method: Literal["contiguous", "affinity"] = Field("affinity", description="of the placement that is begun with")
    objective: Literal["hops", "new_gpus", "gpus"] = Field(
        "hops", description="hops: as placed by method; else a search on whole tokens goes on from there"
    )
    extra_slots: int = Field(0, ge=0, description="of each GPU and layer, for copies; only with top_k 1")
    copies_for: Literal["hops", "load"] = "hops"
    tokens: int = Field(20_000, ge=1, description="drawn at random, that a search on whole tokens counts on")
    time_limit_s: float = Field(120.0, gt=0, description="of each search")

    @model_validator(mode="after")
    def _consistent(self) -> "ServingPoint":
        count, most_k = experts(self.trace), widest(self.trace)
        if self.top_k > most_k:
            raise ValueError(f"top_k is {self.top_k}: {self.trace} has 1 to {most_k} experts per token")
        if count % self.gpus or self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus is {self.gpus}: {count} experts on whole nodes of gpus_per_node {self.gpus_per_node} "
                "do not share evenly"
            )
        if self.top_k > 1 and self.extra_slots:
            raise ValueError(f"extra_slots is {self.extra_slots}: copies are for top_k 1, found {self.top_k}")
        if self.extra_slots > count - count // self.gpus:
            raise ValueError(f"extra_slots is {self.extra_slots}, allowed: 0 to {count - count // self.gpus}")
        return self

    @property
    def label(self) -> str:
        copies = f"-{self.extra_slots}for-{self.copies_for}" if self.extra_slots else ""
        shape = f"{self.gpus}gpusx{self.gpus_per_node}"
        return f"{self.trace}-top{self.top_k}-{self.method}-{self.objective}{copies}-{shape}-seed{self.seed}"


class ServingMetrics(Metrics):
    """Of held-out sequences. Top-1 has hops and load with the copies, top-k the GPUs and nodes that tokens visit."""

    hops_per_token: HopsPerToken | None = None
    intra_hops: HopsPerToken | None = None
    inter_hops: HopsPerToken | None = None
    max_load: Number | None = None
    max_load_worst_layer: Number | None = None
    gpus_visited: Number | None = None
    nodes_visited: Number | None = None
    new_gpus: Number | None = None
    new_nodes: Number | None = None


EXPERIMENT = Experiment(
    parameters=ServingPoint, metrics=ServingMetrics, conditions=("routing", "search", "time_limited"), timed=False
)
