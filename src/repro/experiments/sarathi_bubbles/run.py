"""Run the pipeline's queue model with whole prompts and with chunks, for every draw of lengths and machine."""

from dataclasses import replace

import numpy as np
import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.sarathi_bubbles import BubblesMetrics, BubblesPoint
from repro.flover.arrivals import RequestShape
from repro.flover.queueing.pipeline import Pipeline
from repro.models.gpt_j_neox import GPTJConfig
from repro.scaling import serving
from repro.scaling.machines import CATALOGUE, Machine
from repro.scaling.whatif import bands

# GPT-3's sizes (arXiv 2005.14165, Table 2.1); kernels of a layer as for GPT-J, whose MLP is the same.
GPT3_SIZES = {"layers": 96, "width": 12288, "heads": 96, "ffn": 4 * 12288, "vocab": 50304}
GPT3 = serving.Dense(GPTJConfig(**GPT3_SIZES, rotary_dim=64, context=4096), kernels=8)
SERIES = {  # one varied at a time, by the first draw
    "prompt_per_output": (5.0, 10.0, 20.0),
    "chunk": (128, 256, 512),
    "requests": (128, 256, 512, 1024),  # 128 are served at a time
}


def run(point: BubblesPoint) -> Outcome:
    """Bands of the metrics over the draws. The series has a row per setting of `SERIES`, by the first draw."""
    machine = _machine(point)
    drawn = pd.DataFrame([_one(point, machine, draw) for draw in range(point.draws)])
    rows = [
        {"varied": name, "value": value, **_one(point.model_copy(update={name: value}), machine, 0)}
        for name, values in SERIES.items()
        for value in values
    ]
    metrics = BubblesMetrics(**bands({name: column.to_numpy() for name, column in drawn.items()}))
    setting = f"GPT-3, {point.gpus} A100-80GB a stage, {point.stages} stages; lengths {point.shortest} to "
    setting += f"{point.longest}, drawn uniformly, micro-batches of {point.slots}: all of these inferred"
    return Outcome(metrics, "modelled", {"setting": setting}, pd.DataFrame(rows), "A100-80GB nodes (arithmetic)")


def _machine(point: BubblesPoint) -> Machine:
    """[INF] a node of `gpus` A100 with the links of one of four."""
    kind = CATALOGUE["wilkes3"]
    node, *outside = kind.tiers
    return replace(kind, tiers=(replace(node, size=point.gpus), *outside)).machine(1, point.draws, point.seed)


def _one(point: BubblesPoint, machine: Machine, draw: int) -> dict[str, float]:
    """Both policies on the same requests. A stage's share of a pass is that of its layers; sending activations from one
    to the next is left out (it delays whole prompts and chunks alike, per token)."""
    times, generator = serving.PredictedTimes(GPT3, machine, draw), np.random.default_rng([point.seed, draw])
    tokens = generator.integers(point.shortest, point.longest, point.requests, endpoint=True)
    answers = np.maximum(1, np.round(tokens / (1 + point.prompt_per_output))).astype(int)
    shapes = [RequestShape(0.0, int(n - answer), int(answer)) for n, answer in zip(tokens, answers, strict=True)]
    whole, chunked = (Pipeline(point.stages, point.slots, chunk).run(shapes, times) for chunk in (0, point.chunk))
    return {
        "whole_total_seconds": whole.total_seconds,
        "chunked_total_seconds": chunked.total_seconds,
        "whole_bubble_fraction": whole.bubble_fraction,
        "chunked_bubble_fraction": chunked.bubble_fraction,
        "bubble_reduction": float(whole.idle_s.sum() / chunked.idle_s.sum()),
        "speedup": whole.total_seconds / chunked.total_seconds,
    }
