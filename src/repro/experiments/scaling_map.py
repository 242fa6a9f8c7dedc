"""What if: the fastest ZeRO plan that fits, over networks and memories, or over models and numbers of ranks, on machines of today."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.scaling import Hardware

PLANS = ("ddp", "zero1", "zero2", "zero3", "hpz", "zeropp", "mics", "hsdp", "hierarchical", "hierarchical_fp")
FACTORS = tuple(2.0**k for k in range(-6, 5))  # of the links between nodes
MEMORIES_GB = (16, 24, 32, 48, 64, 80, 96, 128, 192, 288, 512)
BEST = ["plan", "seconds", "tflops", "gigabytes", "critical"]  # columns about the best plan of a cell
PARAMETERS = (1e10, 2e10, 5e10, 1e11, 2e11, 5e11, 1e12)


class ScalingMap(Point):
    """`over`: network_memory varies the links between nodes and a rank's memory for one model and machine; size_ranks varies the model
    and the nodes."""

    over: Literal["network_memory", "size_ranks"] = "network_memory"
    hardware: Literal["frontier", "frontier-rccl", "wilkes3", "dgx-h100", "gb200-nvl72", "tpu-like-torus"] = "frontier"
    nodes: int = Field(48, ge=2, description="network_memory: of the machine; size_ranks: not used")
    billions: float = Field(20.0, gt=0, description="network_memory: 10⁹ parameters; size_ranks: not used")
    most_ranks: int = Field(32768, ge=8, description="size_ranks: the largest machine")
    micro_batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)


def run(point: ScalingMap) -> Outcome:
    """The series has a row per cell: `plan` (or "none fits"), its seconds and TFLOPS per rank, at the machine's likely values. Also where the
    hierarchical plan overtakes ZeRO++, as a share of the links' rate, if it does."""
    from repro import scaling

    machine = scaling.hardware(point.hardware)
    table = _network_memory(point, machine) if point.over == "network_memory" else _size_ranks(point, machine)
    metrics = {"cells": Metric(value=len(table), unit="1")}
    for name in PLANS:
        metrics[f"share_{name}"] = Metric(value=float((table.plan == name).mean()), unit="1")
        metrics[f"largest_{name}"] = Metric(
            value=scaling.largest_model(name, machine, point.nodes) / 1e9, unit="10⁹ parameters"
        )
    if point.over == "network_memory":
        config = scaling.gpt(point.billions * 1e9)
        options = {"micro_batch": point.micro_batch, "accumulation": point.accumulation}
        at = scaling.crossover(
            *("hierarchical", "zeropp", config, lambda factor: scaling.with_network(machine, factor)),
            *(FACTORS[0], FACTORS[-1], point.nodes),
            **options,
        )
        if at is not None:
            metrics["crossover_factor"] = Metric(value=at, unit="1")
    return Outcome(metrics, "modelled", series=table, topology=f"{point.hardware} and variants (arithmetic)")


def _network_memory(point: ScalingMap, machine: "Hardware") -> "pd.DataFrame":
    import pandas as pd

    from repro import scaling

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


def _size_ranks(point: ScalingMap, machine: "Hardware") -> "pd.DataFrame":
    from repro import scaling

    per_node = machine.topology(1).world_size
    nodes = [2**k for k in range(30) if per_node <= per_node * 2**k <= point.most_ranks]
    models = [scaling.gpt(parameters) for parameters in PARAMETERS]
    swept = scaling.sweep(
        *([machine], nodes, models, PLANS, [point.accumulation]), micro_batch=point.micro_batch, draws=0
    )
    return scaling.best_plan(swept)[["nodes", "ranks", "parameters", *BEST]]


def label(point: ScalingMap) -> str:
    """Short name of a point for its record file."""
    which = f"{point.billions:g}b-{point.nodes}n" if point.over == "network_memory" else f"to{point.most_ranks}"
    return f"{point.over}-{point.hardware}-{which}-{point.micro_batch}x{point.accumulation}"


EXPERIMENT = Experiment(
    summary="The fastest ZeRO plan that fits, over networks, memories, models and numbers of ranks",
    parameters=ScalingMap,
    run=run,
    label=label,
    reports=frozenset(
        {"cells", "crossover_factor"} | {f"{kind}_{plan}" for kind in ("share", "largest") for plan in PLANS}
    ),
    timed=False,
)
