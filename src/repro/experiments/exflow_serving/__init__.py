"""Copies of hot experts in spare slots, and, for top-k routing, placing by whole tokens."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, HopsPerToken, Number, Point, metrics
from repro.experiments.common.traces import TraceName, experts


class ServingPoint(Point):
    """Placed by training sequences, counted on held-out ones. `seed` splits them and seeds the searches."""

    trace: TraceName = "gptoss20b"
    top_k: int = Field(1, ge=1, description="experts per token and layer")
    gpus: int = Field(8, ge=1)
    gpus_per_node: int = Field(4, ge=1)
    method: Literal["contiguous", "affinity"] = Field("affinity", description="of the placement that is begun with")
    # hops: as placed by method; else a search on whole tokens goes on from there.
    objective: Literal["hops", "new_gpus", "gpus"] = "hops"
    extra_slots: int = Field(0, ge=0, description="of each GPU and layer, for copies; only with top_k 1")
    copies_for: Literal["hops", "load"] = "hops"
    tokens: int = Field(20_000, ge=1, description="drawn at random, that a search on whole tokens counts on")
    time_limit_s: float = Field(120.0, gt=0, description="of each search")

    def contradictions(self) -> Iterator[str]:
        count, most_k = experts(self.trace), 4 if self.trace == "gptoss20b" else 1
        others = count - count // self.gpus
        if self.top_k > most_k:
            yield f"top_k is {self.top_k}: {self.trace} has 1 to {most_k} experts per token"
        if count % self.gpus or self.gpus % self.gpus_per_node:
            nodes = f"whole nodes of gpus_per_node {self.gpus_per_node}"
            yield f"gpus is {self.gpus}: {count} experts on {nodes} do not share evenly"
        if self.top_k > 1 and self.extra_slots:
            yield f"extra_slots is {self.extra_slots}: copies are for top_k 1, found {self.top_k}"
        if self.extra_slots > others:
            yield f"extra_slots is {self.extra_slots}, allowed: 0 to {others}"

    @property
    def label(self) -> str:
        copies = f"-{self.extra_slots}for-{self.copies_for}" if self.extra_slots else ""
        shape = f"{self.gpus}gpusx{self.gpus_per_node}"
        return f"{self.trace}-top{self.top_k}-{self.method}-{self.objective}{copies}-{shape}-seed{self.seed}"


class ServingMetrics(
    metrics(HopsPerToken | None, "hops_per_token", "intra_hops", "inter_hops"),
    metrics(Number | None, "max_load", "max_load_worst_layer"),
    metrics(Number | None, "gpus_visited", "nodes_visited", "new_gpus", "new_nodes"),
):
    """Of held-out sequences. Top-1 has hops and load with the copies, top-k the GPUs and nodes that tokens visit."""


EXPERIMENT = Experiment(ServingPoint, ServingMetrics, conditions=("routing", "search", "time_limited"), timed=False)
