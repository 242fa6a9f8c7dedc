"""Run the pipeline's queue model with whole prompts and with chunks, for every draw of lengths and machine."""

from dataclasses import replace

import numpy as np
import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.sarathi_bubbles import CHOICES, BubblesMetrics, BubblesPoint
from repro.flover.arrivals import RequestShape
from repro.flover.queueing.pipeline import Pipeline
from repro.models.gpt_j_neox import GPTJConfig
from repro.scaling import serving
from repro.scaling.machines import CATALOGUE, Machine
from repro.scaling.whatif import bands

# GPT-3's sizes (arXiv 2005.14165, Table 2.1); kernels of a layer as for GPT-J, whose MLP is the same.
GPT3_SIZES = {"layers": 96, "width": 12288, "heads": 96, "ffn": 4 * 12288, "vocab": 50304}
GPT3 = serving.Dense(GPTJConfig(**GPT3_SIZES, rotary_dim=64, context=4096), kernels=8)


def run(point: BubblesPoint) -> Outcome:
    """Bands of the metrics over the draws. The series has the bands of those with each value of each of `CHOICES`."""
    machine, chosen = _machine(point), _chosen(point)
    points = [point.model_copy(update=choice) for choice in chosen.to_dict("records")]
    drawn = pd.DataFrame([_one(each, machine, draw) for draw, each in enumerate(points)])
    rows = [
        {"varied": name, "value": value, **_bands(mine)}
        for name in CHOICES
        for value, mine in drawn.groupby(chosen[name])
    ]
    values = {name: ", ".join(f"{value:g}" for value in sorted(set(chosen[name]))) for name in CHOICES}
    told = "; ".join(f"{name.replace('_', ' ')} {each}" for name, each in values.items())
    setting = f"GPT-3, {point.gpus} A100-80GB a stage, {point.stages} stages; lengths {point.shortest} to "
    setting += f"{point.longest}, drawn uniformly, micro-batches of {point.slots}; {told}; each as often: "
    setting += "all of these inferred"
    metrics = BubblesMetrics(**_bands(drawn))
    return Outcome(metrics, "modelled", {"setting": setting}, pd.DataFrame(rows), "A100-80GB nodes (arithmetic)")


def _chosen(point: BubblesPoint) -> pd.DataFrame:
    """A row per draw: what the point fixes, and else each of `CHOICES` as often, in a random order of its own."""
    values = {name: (fixed,) if (fixed := getattr(point, name)) else known for name, known in CHOICES.items()}
    streams = {name: np.random.default_rng([point.seed, *name.encode()]) for name in CHOICES}
    return pd.DataFrame({name: streams[name].permutation(np.resize(values[name], point.draws)) for name in CHOICES})


def _bands(drawn: pd.DataFrame) -> dict[str, float]:
    return bands({name: column.to_numpy() for name, column in drawn.items()})


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
    # A prompt and an answer have a token at least.
    answers = np.round(tokens / (1 + point.prompt_per_output)).clip(1, tokens - 1).astype(int)
    shapes = [RequestShape(0.0, int(n - answer), int(answer)) for n, answer in zip(tokens, answers, strict=True)]
    whole, chunked = (Pipeline(point.stages, point.slots, chunk).run(shapes, times) for chunk in (0, point.chunk))
    if not chunked.idle_s.sum():
        raise ValueError(f"requests is {point.requests}, chunk {point.chunk}: no stage waits for another, so no ratio")
    return {
        "whole_total_seconds": whole.total_seconds,
        "chunked_total_seconds": chunked.total_seconds,
        "whole_bubble_fraction": whole.bubble_fraction,
        "chunked_bubble_fraction": chunked.bubble_fraction,
        "bubble_reduction": float(whole.idle_s.sum() / chunked.idle_s.sum()),
        "speedup": whole.total_seconds / chunked.total_seconds,
    }
