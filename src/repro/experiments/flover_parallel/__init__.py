"""Fused decoding over tensor-parallel ranks, in a node or between nodes, with the paper's reordering or without."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number
from repro.experiments.common.names import Layout
from repro.experiments.common.ranks import OnRanks
from repro.experiments.common.serving import ServedMetrics
from repro.flover import paper


class ParallelPoint(OnRanks):
    """LLaMA with random weights. Prompts have 8 tokens, answers 128 to `longest`, times `length_scale`."""

    nodes: int = Field(1, ge=1)
    gcds: int = Field(1, ge=1, description="ranks per package")
    layout: Layout = "window"
    layers: int = Field(8, ge=1, le=1000)
    width: int = Field(256, ge=1)
    heads: int = Field(8, ge=1)
    kv_heads: int = Field(0, ge=0, description="0: as many as heads")
    ffn: int = Field(688, ge=1)
    vocab: int = Field(4096, ge=2)
    dtype: Literal["float32", "bfloat16"] = "float32"
    requests: int = Field(16, ge=1)
    interval_s: float = Field(0.02, ge=0, description="between arrivals")
    longest: int = Field(512, ge=paper.SHORTEST, description="longest answer, before scaling")
    length_scale: float = Field(0.125, gt=0, description="factor on answer lengths")
    max_slots: int = Field(32, ge=1, description="requests decoded at once")
    cluster_mbit_s: float = Field(50.0, gt=0)

    def contradictions(self) -> Iterator[str]:
        for name in ("heads", "kv_heads", "ffn"):
            if getattr(self, name) % self.ranks:
                yield f"{name} is {getattr(self, name)}: {self.ranks} ranks cannot share it evenly"

    @property
    def label(self) -> str:
        return f"{self.layout}-tp{self.shape_label}-n{self.requests}-uniform{self.longest}{self.fabric_label}"


class ParallelMetrics(ServedMetrics):
    """`ranks_agree`: all ranks ran the same passes. `tokens_equal_fraction`: of some requests, against one process."""

    ranks_agree: Number
    tokens_equal_fraction: Number


def _memory(point: ParallelPoint) -> float:
    """Weights and the cache of keys and values, which ranks share evenly; the embedding is on each. (The whole model,
    which rank 0 decodes with afterwards, is smaller than both where several ranks are needed.)"""
    key_width = point.width // point.heads * (point.kv_heads or point.heads)
    layer = 2 * point.width**2 + 2 * point.width * key_width + 3 * point.width * point.ffn
    positions = paper.PROMPT_TOKENS + max(1, round(point.longest * point.length_scale))
    embedding = point.vocab * point.width
    shared = point.layers * (layer + 2 * key_width * positions * point.max_slots) + embedding  # the head is as large
    return (4 if point.dtype == "float32" else 2) * (shared / point.ranks + embedding)


EXPERIMENT = Experiment(
    ParallelPoint, ParallelMetrics, conditions=("fabric", "requests_checked"), memory=_memory, timeout_s=3600
)
