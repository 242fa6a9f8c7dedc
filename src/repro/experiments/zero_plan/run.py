"""Rank the plans of a machine and a model."""

from typing import Any

import pandas as pd
import torch

from repro.comm import Route
from repro.experiments.base import Outcome
from repro.experiments.common.gpt import paper_gpt
from repro.experiments.common.names import NAMED
from repro.experiments.zero_plan import ZeroPlan, ZeroPlanMetrics
from repro.experiments.zero_train import ZeroTrain
from repro.models.gpt import GPT, GPTConfig
from repro.topology import Level, Topology, frontier
from repro.zero import Plan, memory, plan, traffic
from repro.zero.layout import layout


def run(point: ZeroPlan) -> Outcome:
    """Rank all plans; the series has every candidate, and the plans with a name."""
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
    machine = plan.Machine(compute_s=compute)
    rows, named_metrics = [], {}
    for candidate in plan.search(
        model, topology, micro_batches=point.accumulation, machine=machine, activations=activations, gradient_bytes=2
    ):
        rows.append(_row(candidate.plan, candidate.step_s, candidate.rank_bytes) | {"named": False})
    for name in NAMED:
        named = plan.named(name, topology)
        seconds = traffic.step_seconds(named, model, point.accumulation, compute_s=compute)
        states = sum(memory.predict(named, model).values())
        need = states + memory.working(named, model) + activations
        rows.append(_row(named, seconds, need) | {"named": True})
        per_parameter = sum(memory.formula(named, 10**9).values()) / 1e9
        named_metrics |= {
            f"step_seconds_{name}": seconds,
            f"gigabytes_{name}": need / 1e9,
            f"largest_{name}": point.memory_gb / per_parameter,
        }
    table = pd.DataFrame(rows)
    table["fits"] = table.gigabytes <= point.memory_gb
    fitting = table[table.fits & ~table.named]
    metrics = ZeroPlanMetrics(
        parameters=config.parameters,
        compute_seconds=compute,
        plans=int((~table.named).sum()),
        plans_that_fit=len(fitting),
        step_seconds_best=fitting.step_seconds.min() if len(fitting) else None,
        **named_metrics,
    )
    best = fitting.plan.iloc[0] if len(fitting) else "none"
    where = f"{point.machine}, {point.nodes} nodes, {point.model} (arithmetic)"
    return Outcome(metrics, "modelled", {"best": best}, table, where)


def _row(plan: Plan, seconds: float, nbytes: float) -> dict[str, Any]:
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


def _words(route: Route) -> str:
    return " | ".join(
        f"{'+'.join(hop)} {'INT' if bits < 16 else ''}{bits}" for hop, bits in zip(route.hops, route.bits, strict=True)
    )


def _topology(point: ZeroPlan) -> Topology:
    if point.machine == "frontier":
        return frontier(point.nodes)
    if point.machine == "a100":  # a node's two rails of 25 GB/s are shared by 4 GPUs
        return Topology(
            (Level("package", 1), Level("node", 4, 300e9, 2e-6), Level("cluster", point.nodes, 12.5e9, 5e-6))
        )
    return ZeroTrain(nodes=point.nodes).topology


def _config(point: ZeroPlan) -> GPTConfig:
    if point.model == "small":
        return ZeroTrain(seq_len=point.seq_len).gpt
    return paper_gpt(point.model, point.seq_len)


def _compute_seconds(point: ZeroPlan, config: GPTConfig) -> float:
    """6 FLOPs per parameter and token, 8 with recomputation."""
    tokens = point.seq_len * point.micro_batch * point.accumulation
    return (8 if config.checkpointing else 6) * config.parameters * tokens / (point.sustained_tflops * 1e12)
