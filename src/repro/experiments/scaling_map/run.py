"""Sweep the plans and keep the best of each cell."""

import pandas as pd

from repro import scaling
from repro.experiments.base import Outcome
from repro.experiments.scaling_map import PLANS, ScalingMap, ScalingMapMetrics

FACTORS = tuple(2.0**k for k in range(-6, 5))  # of the links between nodes
MEMORIES_GB = (16, 24, 32, 48, 64, 80, 96, 128, 192, 288, 512)
BEST = ["plan", "seconds", "tflops", "gigabytes", "critical"]  # columns about the best plan of a cell
PARAMETERS = (1e10, 2e10, 5e10, 1e11, 2e11, 5e11, 1e12)


def run(point: ScalingMap) -> Outcome:
    """The series has a row per cell: `plan` (or "none fits"), its seconds and TFLOPS per rank, at likely values."""
    machine = scaling.hardware(point.hardware)
    table = _network_memory(point, machine) if point.over == "network_memory" else _size_ranks(point, machine)
    metrics = ScalingMapMetrics(
        cells=len(table),
        crossover_factor=_crossover(point, machine) if point.over == "network_memory" else None,
        **{f"share_{name}": float((table.plan == name).mean()) for name in PLANS},
        **{f"largest_{name}": scaling.largest_model(name, machine, point.nodes) / 1e9 for name in PLANS},
    )
    return Outcome(metrics, "modelled", series=table, topology=f"{point.hardware} and variants (arithmetic)")


def _crossover(point: ScalingMap, machine: scaling.Hardware) -> float | None:
    return scaling.crossover(
        *("hierarchical", "zeropp", scaling.gpt(point.billions * 1e9)),
        *(lambda factor: scaling.with_network(machine, factor), FACTORS[0], FACTORS[-1], point.nodes),
        micro_batch=point.micro_batch,
        accumulation=point.accumulation,
    )


def _network_memory(point: ScalingMap, machine: scaling.Hardware) -> pd.DataFrame:
    config, parts = scaling.gpt(point.billions * 1e9), []
    for factor in FACTORS:
        swept = scaling.sweep(
            *([scaling.with_network(machine, factor)], [point.nodes], [config], PLANS, [point.accumulation]),
            micro_batch=point.micro_batch,
            draws=0,
        )
        for memory in MEMORIES_GB:
            best = scaling.best_plan(swept.assign(fits=swept.gigabytes <= memory))
            parts.append(best.assign(factor=factor, memory_gb=memory))
    return pd.concat(parts, ignore_index=True)[["factor", "memory_gb", *BEST]]


def _size_ranks(point: ScalingMap, machine: scaling.Hardware) -> pd.DataFrame:
    per_node = machine.topology(1).world_size
    if point.most_ranks < per_node:
        raise ValueError(f"most_ranks is {point.most_ranks}, a node of {point.hardware} alone has {per_node}")
    nodes = [2**k for k in range(30) if per_node <= per_node * 2**k <= point.most_ranks]
    models = [scaling.gpt(parameters) for parameters in PARAMETERS]
    swept = scaling.sweep(
        *([machine], nodes, models, PLANS, [point.accumulation]), micro_batch=point.micro_batch, draws=0
    )
    return scaling.best_plan(swept)[["nodes", "ranks", "parameters", *BEST]]
