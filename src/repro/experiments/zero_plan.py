"""Which plan for which machine and model: predicted step time and memory of every ZeRO plan, from the arithmetic of `repro.zero`.

Modelled throughout: bytes over rates, one exchange after the other, and no overlap with compute. What it predicts for the
emulated machine is compared with measured steps in the notebook.
"""

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.experiments.zero_train import ZeroTrain
from repro.records.record import Metric

if TYPE_CHECKING:
    from repro.models.gpt import GPTConfig
    from repro.topology import Topology
    from repro.zero import Plan

NAMES = (
    *("ddp", "zero1", "zero2", "zero3", "hpz", "qwz", "qgz", "zeropp", "mics", "hsdp"),
    *("hierarchical", "hierarchical_fp"),
)
# Layers, hidden size, heads. 20B: GPT-NeoX-20B; 10B: the same depth, narrower. `small` is zero_train's.
MODELS = {"gpt-20b": (44, 6144, 64), "gpt-10b": (44, 4352, 32)}


class ZeroPlan(Point):
    """A machine, a model, a batch. Rates of `frontier` are those of the OLCF user guide with all GCDs busy; `a100`: 4 GPUs a
    node, NVLink 300 GB/s, two HDR200 rails; `emulated`: the shaped network of zero_train."""

    machine: Literal["frontier", "a100", "emulated"] = "frontier"
    nodes: int = Field(48, ge=1)
    model: Literal["gpt-20b", "gpt-10b", "small"] = "gpt-20b"
    seq_len: int = Field(2048, ge=1)
    micro_batch: int = Field(1, ge=1)
    accumulation: int = Field(1, ge=1)
    memory_gb: float = Field(64.0, gt=0, description="per rank")
    sustained_tflops: float = Field(76.0, gt=0, description="of one rank in forward and backward; 40 % of a GCD's peak")


def run(point: ZeroPlan) -> Outcome:
    """Rank all plans; the series has every candidate, and the plans with a name."""
    import pandas as pd
    import torch

    from repro import zero
    from repro.models.gpt import GPT
    from repro.zero import memory, plan, traffic
    from repro.zero.layout import layout

    topology, config = _topology(point), _config(point)
    with torch.device("meta"):
        model = layout(GPT(config))
    compute = _compute_seconds(point, config)
    activations = memory.activations(
        config.layers,
        config.hidden,
        config.seq_len,
        point.micro_batch,
        config.vocab,
        checkpointing=config.checkpointing,
    )
    cost = partial(traffic.step_seconds, compute_s=compute)
    rows, metrics = [], {}
    for candidate in zero.search(
        model, topology, micro_batches=point.accumulation, cost=cost, activations=activations, gradient_bytes=2
    ):
        rows.append(_row(candidate.plan, candidate.step_s, candidate.rank_bytes) | {"named": False})
    for name in NAMES:
        named = plan.named(name, topology)
        seconds = traffic.step_seconds(named, model, point.accumulation, compute_s=compute)
        states = sum(memory.predict(named, model).values())
        need = states + memory.working(named, model) + activations
        rows.append(_row(named, seconds, need) | {"named": True})
        per_parameter = sum(memory.formula(named, 10**9).values()) / 1e9
        metrics[f"step_seconds_{name}"] = Metric(value=seconds, unit="s")
        metrics[f"gigabytes_{name}"] = Metric(value=need / 1e9, unit="GB")
        metrics[f"largest_{name}"] = Metric(value=point.memory_gb / per_parameter, unit="10⁹ parameters")
    table = pd.DataFrame(rows)
    table["fits"] = table.gigabytes <= point.memory_gb
    fitting = table[table.fits & ~table.named]
    metrics |= {
        "parameters": Metric(value=config.parameters, unit="1"),
        "compute_seconds": Metric(value=compute, unit="s"),
        "plans": Metric(value=int((~table.named).sum()), unit="1"),
        "plans_that_fit": Metric(value=len(fitting), unit="1"),
    }
    if len(fitting):
        metrics["step_seconds_best"] = Metric(value=fitting.step_seconds.min(), unit="s")
    return Outcome(
        metrics, "modelled", {"best": fitting.plan.iloc[0] if len(fitting) else "none"}, table, _describe(point)
    )


def _row(plan: "Plan", seconds: float, nbytes: float) -> dict[str, Any]:
    """One plan of the table; bits innermost first."""
    routes = {"weight": plan.weight_route, "gradient": plan.gradient_route, "update": plan.update_route}
    return {
        "plan": plan.name,
        "weights": plan.weights or "-",
        "copy": plan.secondary or "-",
        "gradients": plan.gradients or "-",
        "optimizer": plan.optimizer or "-",
        "across": plan.reduce_across,
        "step_seconds": seconds,
        "gigabytes": nbytes / 1e9,
        **{f"{kind}_route": _words(route) for kind, route in routes.items()},
    }


def _words(route: Any) -> str:
    return " | ".join(
        f"{'+'.join(hop)} {'INT' if bits < 16 else ''}{bits}" for hop, bits in zip(route.hops, route.bits, strict=True)
    )


def _topology(point: ZeroPlan) -> "Topology":
    from repro.topology import Level, Topology, frontier

    if point.machine == "frontier":
        return frontier(point.nodes)
    if point.machine == "a100":  # a node's two rails of 25 GB/s are shared by 4 GPUs
        return Topology(
            (Level("package", 1), Level("node", 4, 300e9, 2e-6), Level("cluster", point.nodes, 12.5e9, 5e-6))
        )
    return ZeroTrain(nodes=point.nodes).topology


def _config(point: ZeroPlan) -> "GPTConfig":
    from repro.models.gpt import GPTConfig

    if point.model == "small":
        return ZeroTrain(seq_len=point.seq_len).gpt
    layers, hidden, heads = MODELS[point.model]
    return GPTConfig(layers, hidden, heads, point.seq_len, vocab=50432, checkpointing=True)


def _compute_seconds(point: ZeroPlan, config: "GPTConfig") -> float:
    """6 FLOPs per parameter and token, 8 with recomputation."""
    tokens = point.seq_len * point.micro_batch * point.accumulation
    return (8 if config.checkpointing else 6) * config.parameters * tokens / (point.sustained_tflops * 1e12)


def _describe(point: ZeroPlan) -> str:
    return f"{point.machine}, {point.nodes} nodes, {point.model} (arithmetic)"


def label(point: ZeroPlan) -> str:
    """Short name of a point for its record file."""
    return f"{point.machine}-{point.nodes}n-{point.model}-{point.accumulation}mb"


EXPERIMENT = Experiment(
    summary="Predicted step time and memory of every ZeRO plan on a machine, and which is best",
    parameters=ZeroPlan,
    run=run,
    label=label,
    reports=frozenset(
        {"parameters", "compute_seconds", "plans", "plans_that_fit", "step_seconds_best", "best"}
        | {f"{kind}_{name}" for kind in ("step_seconds", "gigabytes", "largest") for name in NAMES}
    ),
    timed=False,
)
