"""Predict the steps of all plans, sizes and changes."""

from collections.abc import Callable

import pandas as pd

from repro import scaling
from repro.experiments.base import Outcome
from repro.experiments.common.bands import bands_of
from repro.experiments.common.gpt import paper_gpt
from repro.experiments.scaling_train import PLANS, RATIOS, ScalingTrain, ScalingTrainMetrics
from repro.scaling.whatif import banded
from repro.topology import Topology
from repro.zero import Plan, plan

NODES = (1, 2, 4, 8, 16, 32, 48, 128, 512, 2048, 4096)


def run(point: ScalingTrain) -> Outcome:
    """Bands of every plan, of the paper's ratios, and of the efficiency against one node. Series: `kind` ranks has a row per number of
    nodes and plan, `levels` a row per change to the hierarchical plan, `tornado` a row per uncertain parameter, of the first ratio."""
    machine, config = scaling.hardware(point.hardware), paper_gpt(point.model, point.seq_len)
    options = {"micro_batch": point.micro_batch, "accumulation": point.accumulation}

    def steps(nodes: int) -> dict[str, scaling.Step]:
        same = {"draws": point.draws, "seed": point.seed}
        return {name: scaling.predict(name, config, machine, nodes, **options, **same) for name in PLANS}

    counts = sorted({count for count in NODES if count < point.nodes} | {1, point.nodes})
    sizes = {count: steps(count) for count in counts}
    found, alone = sizes[point.nodes], sizes[1]
    values, sizes_of, conditions = {}, {}, {}
    for name, step in found.items():
        values |= {
            f"tflops_{name}": step.tflops_per_rank,
            f"step_seconds_{name}": step.seconds,
            f"efficiency_{name}": alone[name].seconds / step.seconds,
        }
        sizes_of |= {f"gigabytes_{name}": step.rank_bytes / 1e9, f"fits_{name}": float(step.fits)}
        conditions[f"critical_{name}"] = step.critical
    values |= {name: found[theirs].seconds / found[ours].seconds for name, (ours, theirs) in RATIOS.items()}
    metrics = ScalingTrainMetrics(ranks=machine.topology(point.nodes).world_size, **bands_of(values), **sizes_of)

    def first_ratio(at: scaling.Hardware) -> float:
        ours, theirs = (
            scaling.predict(v, config, at, point.nodes, draws=0, **options) for v in ("hierarchical", "zeropp")
        )
        return float(theirs.seconds / ours.seconds)

    ranks = [
        {"kind": "ranks", "nodes": count, "ranks": machine.topology(count).world_size, "plan": name}
        | {"gigabytes": step.rank_bytes / 1e9, "fits": step.fits}
        | banded("tflops", step.tflops_per_rank)
        | banded("efficiency", alone[name].seconds / step.seconds)
        for count, steps_of in sizes.items()
        for name, step in steps_of.items()
    ]
    levels = [
        {"kind": "levels", "plan": name, "gigabytes": step.rank_bytes / 1e9, "fits": step.fits}
        | banded("tflops", step.tflops_per_rank)
        for name, make in _changes().items()
        for step in [scaling.predict(make, config, machine, point.nodes, **options, draws=point.draws, seed=point.seed)]
    ]
    tornado = scaling.sensitivity(machine, first_ratio).assign(kind="tornado")
    series = pd.concat([pd.DataFrame(ranks), pd.DataFrame(levels), tornado], ignore_index=True)
    topology = f"{point.hardware}, {point.nodes} nodes (arithmetic)"
    return Outcome(metrics, "modelled", conditions, series, topology)


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
