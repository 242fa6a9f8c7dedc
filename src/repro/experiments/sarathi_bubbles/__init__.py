"""SARATHI's pipeline (arXiv 2308.16369): how long stages wait for each other with whole prompts and with chunks, modelled.

GPT-3's sizes, tensor-parallel in a node and pipeline-parallel between nodes of A100. [INF] The abstract names neither
the lengths and the number of requests nor the micro-batch, nor the chunk. Lengths and micro-batches are ours. The other
`CHOICES` decide the result, and are drawn.
"""

from collections.abc import Iterator

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, Ratio, Seconds, bands

CHOICES = {  # [INF] values that are drawn, each as often
    "prompt_per_output": (5.0, 10.0, 20.0),
    "chunk": (128, 256, 512),
    "requests": (128, 256, 512, 1024),  # 128 are served at a time
}


class BubblesPoint(Point):
    """Requests that are all there at the start. Each has `shortest` to `longest` tokens, drawn uniformly; its prompt is
    `prompt_per_output` times as long as its answer. There are `stages` micro-batches of up to `slots` requests each."""

    stages: int = Field(8, ge=2, le=96, description="one would wait for nobody")
    gpus: int = Field(8, ge=1, description="of a stage: one node")
    slots: int = Field(16, ge=1)
    chunk: int = Field(0, ge=0, description="tokens of a pass, those that are decoded included; 0: drawn")
    requests: int = Field(0, ge=0, description="0: drawn")
    shortest: int = Field(1024, ge=2)
    longest: int = Field(4096, ge=2)
    prompt_per_output: float = Field(0.0, ge=0, description="0: drawn")
    draws: int = Field(144, ge=2, description="of lengths, choices and the machine's uncertain parameters")

    def contradictions(self) -> Iterator[str]:
        if self.shortest > self.longest:
            yield f"shortest is {self.shortest}, longest {self.longest}: must not be above it"

    @property
    def label(self) -> str:
        fixed = {"c": self.chunk, "pd": self.prompt_per_output, "n": self.requests}
        told = "".join(f"-{name}{value:g}" for name, value in fixed.items() if value)
        return f"gpt3-{self.stages}x{self.gpus}-s{self.slots}{told}"


class BubblesMetrics(
    bands(Seconds, "whole_total_seconds", "chunked_total_seconds"),
    bands(Number, "whole_bubble_fraction", "chunked_bubble_fraction"),
    bands(Ratio, "bubble_reduction", "speedup"),
):
    """`whole`: newcomers' prompts in one pass; `chunked`: by chunks. `bubble_fraction`: share of the stages' time in
    which they wait. `bubble_reduction`: seconds that stages wait, whole ÷ chunked; `speedup`: total times likewise."""


EXPERIMENT = Experiment(BubblesPoint, BubblesMetrics, conditions=("setting",), timed=False)
