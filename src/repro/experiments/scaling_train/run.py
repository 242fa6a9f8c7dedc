"""Predict the steps of all plans, sizes and changes; and how long a run of zero_train takes, for a platform's plan."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from repro import scaling
from repro.experiments.base import Outcome
from repro.experiments.common.modelled import paper_gpt
from repro.experiments.scaling_train import PLANS, RATIOS, ScalingTrain, ScalingTrainMetrics
from repro.experiments.zero_train import ZeroTrain
from repro.scaling.overlap import model_error
from repro.scaling.whatif import bands
from repro.topology import Topology
from repro.zero import Plan, plan

NODES = (1, 2, 4, 8, 16, 32, 48, 128, 512, 2048, 4096)
# By a library's plan or a variant: the plan of ours that takes about as long, to predict the time of a run.
_LIKE = {
    "deepspeed_zero3": "zero3",
    "deepspeed_zeropp": "zeropp",
    "fsdp2": "zero3",
    "fsdp2_hsdp": "hsdp",
    "fsdp2_reshard": "hpz",
    "qgz_one_hop": "qgz",
    "best": "zeropp",
}
SETUP_S = 60.0  # [INF] model, optimizer and first connections, once a run


def run(point: ScalingTrain) -> Outcome:
    """Series, by `kind`: ranks has a row per number of nodes and plan, levels a row per change to the hierarchical plan,
    tornado a row per uncertain parameter of machine and engine, of the first ratio."""
    machine, config = scaling.hardware(point.hardware), paper_gpt(point.model, point.seq_len)
    batch = {"micro_batch": point.micro_batch, "accumulation": point.accumulation}
    engine = scaling.Assumptions.drawn(point.draws, point.seed)
    drawn = batch | {"draws": point.draws, "seed": point.seed, "assumed": engine}
    counts = sorted({count for count in NODES if count < point.nodes} | {1, point.nodes})
    sizes = {n: {name: scaling.predict(name, config, machine, n, **drawn) for name in PLANS} for n in counts}
    found, alone = sizes[point.nodes], {name: _fewest(name, sizes) for name in PLANS}
    values, sizes_of = {}, {}
    for name, step in found.items():
        values |= {f"tflops_{name}": step.tflops_per_rank, f"step_seconds_{name}": step.seconds}
        if step.fits:
            values[f"efficiency_{name}"] = alone[name].seconds / step.seconds
        sizes_of |= {f"gigabytes_{name}": step.rank_bytes / 1e9, f"fits_{name}": float(step.fits)}
    perhaps = {name: step.seconds * model_error(name, point.draws, point.seed) for name, step in found.items()}
    values |= {name: perhaps[theirs] / perhaps[ours] for name, (ours, theirs) in RATIOS.items()}
    metrics = ScalingTrainMetrics(ranks=machine.topology(point.nodes).world_size, **bands(values), **sizes_of)
    conditions = {f"critical_{name}": step.critical for name, step in found.items()}

    def first_ratio(at: scaling.Hardware, assumed: scaling.Assumptions) -> float:
        pair = RATIOS["hierarchical_over_zeropp"]
        ours, theirs = (scaling.predict(v, config, at, point.nodes, draws=0, assumed=assumed, **batch) for v in pair)
        return float(theirs.seconds / ours.seconds)

    ranks = [
        {"kind": "ranks", "nodes": count, "ranks": machine.topology(count).world_size}
        | _row(name, step)
        | bands({"efficiency": alone[name].seconds / step.seconds})
        for count, steps in sizes.items()
        for name, step in steps.items()
    ]
    levels = [
        {"kind": "levels"} | _row(name, scaling.predict(make, config, machine, point.nodes, **drawn))
        for name, make in _changes().items()
    ]
    tornado = scaling.sensitivity(machine, first_ratio).assign(kind="tornado")
    series = pd.concat([pd.DataFrame(ranks), pd.DataFrame(levels), tornado], ignore_index=True)
    return Outcome(metrics, "modelled", conditions, series, f"{point.hardware}, {point.nodes} nodes (arithmetic)")


def _fewest(name: str, sizes: dict[int, dict[str, scaling.Step]]) -> scaling.Step:
    """The step on the fewest nodes that hold the plan; on the most where none does."""
    steps = [sizes[count][name] for count in sorted(sizes)]
    return next((step for step in steps if step.fits), steps[-1])


def _row(plan: str, step: scaling.Step) -> dict[str, Any]:
    size = {"plan": plan, "gigabytes": step.rank_bytes / 1e9, "fits": step.fits}
    return size | bands({"tflops": step.tflops_per_rank})


def _changes() -> dict[str, Callable[[Topology], Plan]]:
    """The hierarchical plan, and with one level or width changed at a time: what is each worth?"""
    return {
        "hierarchical": plan.hierarchical,
        "weights over the node": lambda t: plan.hierarchical(t, weights=t.names[-2]),
        "weights and gradients over all ranks": lambda t: plan.hierarchical(t, t.names[-1], t.names[-1]),
        "gradients over the innermost level": lambda t: plan.hierarchical(t, gradients=t.names[0]),
        "gradients over all ranks": lambda t: plan.hierarchical(t, gradients=t.names[-1]),
        "sums across nodes per micro-batch": lambda t: plan.hierarchical(t, reduce_across="micro_batch"),
        "16-bit weights": lambda t: plan.hierarchical(t, weight_bits=16, update_bits=16),
        "16-bit gradients": lambda t: plan.hierarchical(t, gradient_bits=16),
        "16 bits everywhere": plan.hierarchical_fp,
    }


def train_seconds(point: ZeroTrain, hardware: str) -> float | None:
    """Seconds of a zero_train run on `hardware`: set-up, and its steps at the slow end of the band. None where the
    hardware's nodes have another number of ranks, and for `fabric` unshaped. ValueError for unknown hardware."""
    machine = scaling.hardware(hardware)
    if point.fabric != "auto" or machine.topology(1).world_size != point.packages * point.gcds:
        return None
    batch = {"micro_batch": point.micro_batch, "accumulation": point.accumulation}
    step = scaling.predict(_LIKE.get(point.plan, point.plan), point.gpt, machine, point.nodes, draws=64, **batch)
    return SETUP_S + point.steps * float(np.quantile(step.seconds, 0.95))
