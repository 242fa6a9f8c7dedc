"""Hierarchical ZeRO++ at the paper's sizes, and beyond: predicted steps with bands, and which unknown decides the ratio of two plans."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.experiments.zero_plan import MODELS
from repro.records.record import Metric

if TYPE_CHECKING:
    from collections.abc import Callable

    from repro.experiments.zero_train import ZeroTrain
    from repro.models.gpt import GPTConfig
    from repro.topology import Topology
    from repro.zero import Plan

PLANS = ("ddp", "zero3", "zeropp", "mics", "hierarchical", "hierarchical_fp")
# Pairs whose ratio the paper reports: how many times as fast the first is.
RATIOS = {
    "hierarchical_over_zeropp": ("hierarchical", "zeropp"),
    "zeropp_over_zero3": ("zeropp", "zero3"),
    "hierarchical_over_zero3": ("hierarchical", "zero3"),
}
NODES = (1, 2, 4, 8, 16, 32, 48, 128, 512, 2048, 4096)


class ScalingTrain(Point):
    """A machine, a model, a batch; `frontier-rccl` is a scenario of its own (one ring, slow starts)."""

    hardware: Literal["frontier", "frontier-rccl", "wilkes3", "dgx-h100", "gb200-nvl72", "tpu-like-torus"] = "frontier"
    nodes: int = Field(48, ge=1)
    model: Literal["gpt-20b", "gpt-10b"] = "gpt-20b"
    seq_len: int = Field(2048, ge=1)
    micro_batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)
    draws: int = Field(1000, ge=2, description="of the machine's uncertain parameters")

    @property
    def gpt(self) -> "GPTConfig":
        """Sizes of the model."""
        from repro.models.gpt import GPTConfig

        layers, hidden, heads = MODELS[self.model]
        return GPTConfig(layers, hidden, heads, self.seq_len, vocab=50432, checkpointing=True)


def run(point: ScalingTrain) -> Outcome:
    """Bands of every plan, of the paper's ratios, and of the efficiency against one node. Series: `kind` ranks has a row per number of
    nodes and plan, `levels` a row per change to the hierarchical plan, `tornado` a row per uncertain parameter, of the first ratio."""
    import pandas as pd

    from repro import scaling
    from repro.scaling.whatif import banded

    machine = scaling.hardware(point.hardware)
    options = {"micro_batch": point.micro_batch, "accumulation": point.accumulation}

    def steps(nodes: int) -> "dict[str, scaling.Step]":
        same = {"draws": point.draws, "seed": point.seed}
        return {name: scaling.predict(name, point.gpt, machine, nodes, **options, **same) for name in PLANS}

    counts = sorted({count for count in NODES if count < point.nodes} | {1, point.nodes})
    sizes = {count: steps(count) for count in counts}
    found, alone = sizes[point.nodes], sizes[1]
    metrics: dict[str, Metric] = {"ranks": Metric(value=machine.topology(point.nodes).world_size, unit="1")}
    conditions = {}
    for name, step in found.items():
        metrics |= _band(f"tflops_{name}", step.tflops_per_rank, "TFLOP/s")
        metrics |= _band(f"step_seconds_{name}", step.seconds, "s")
        metrics |= _band(f"efficiency_{name}", alone[name].seconds / step.seconds, "1")
        metrics[f"gigabytes_{name}"] = Metric(value=step.rank_bytes / 1e9, unit="GB")
        metrics[f"fits_{name}"] = Metric(value=float(step.fits), unit="1")
        conditions[f"critical_{name}"] = step.critical
    for name, (ours, theirs) in RATIOS.items():
        metrics |= _band(name, found[theirs].seconds / found[ours].seconds, "×")

    def first_ratio(at: "scaling.Hardware") -> float:
        ours, theirs = (
            scaling.predict(v, point.gpt, at, point.nodes, draws=0, **options) for v in ("hierarchical", "zeropp")
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
        for step in [
            scaling.predict(make, point.gpt, machine, point.nodes, **options, draws=point.draws, seed=point.seed)
        ]
    ]
    tornado = scaling.sensitivity(machine, first_ratio).assign(kind="tornado")
    series = pd.concat([pd.DataFrame(ranks), pd.DataFrame(levels), tornado], ignore_index=True)
    topology = f"{point.hardware}, {point.nodes} nodes (arithmetic)"
    return Outcome(metrics, "modelled", conditions, series, topology)


def _changes() -> "dict[str, Callable[[Topology], Plan]]":
    """The hierarchical plan, and with one level or width changed at a time: what is each worth?"""
    from repro.zero import plan

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


def _band(name: str, value: "object", unit: str) -> dict[str, Metric]:
    from repro.scaling.whatif import banded

    return {key: Metric(value=number, unit=unit) for key, number in banded(name, value).items()}


def label(point: ScalingTrain) -> str:
    """Short name of a point for its record file."""
    return f"{point.hardware}-{point.nodes}n-{point.model}-{point.micro_batch}x{point.seq_len}x{point.accumulation}"


_BANDS = [
    *RATIOS,
    *(f"{kind}_{plan}" for kind in ("tflops", "step_seconds", "efficiency") for plan in PLANS),
]


# Our plans under the libraries' names, for the time that a run takes.
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


def train_seconds(point: "ZeroTrain", hardware: str) -> float | None:
    """Seconds of a zero_train run on `hardware`: set-up, and its steps at the slow end of the band. None for a shape of node that the
    hardware does not have, and where times are not the machine's."""
    import numpy as np

    from repro import scaling
    from repro.zero import plan

    machine = scaling.hardware(hardware)
    if point.fabric != "auto" or machine.topology(1).world_size != point.packages * point.gcds:
        return None
    chosen = plan.named(_LIKE.get(point.plan, point.plan), machine.topology(point.nodes))
    step = scaling.predict_step(
        chosen, point.gpt, machine.machine(point.nodes, draws=64), point.micro_batch, point.accumulation
    )
    return SETUP_S + point.steps * float(np.quantile(step.seconds, 0.95))


EXPERIMENT = Experiment(
    summary="Predicted steps of the ZeRO plans at 8 to 384 GCDs and on other machines, with bands",
    parameters=ScalingTrain,
    run=run,
    label=label,
    reports=frozenset({f"{name}{end}" for name in _BANDS for end in ("_low", "", "_high")})
    | {f"{kind}_{plan}" for kind in ("gigabytes", "fits", "critical") for plan in PLANS}
    | {"ranks"},
    timed=False,
    predicts={"zero_train": train_seconds},
)
