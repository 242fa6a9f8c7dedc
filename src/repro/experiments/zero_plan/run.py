"""Rank the plans of a machine and a model."""

from functools import partial
from typing import Any

import pandas as pd

from repro import zero
from repro.comm import Route
from repro.experiments.base import Outcome
from repro.experiments.common.modelled import paper_gpt
from repro.experiments.common.names import NAMED
from repro.experiments.zero_plan import ZeroPlan, ZeroPlanMetrics
from repro.experiments.zero_train import ZeroTrain
from repro.scaling.step import activations, layout_of
from repro.topology import Level, Topology, frontier
from repro.zero import memory, plan, traffic
from repro.zero.plan_search import Candidate


def run(point: ZeroPlan) -> Outcome:
    """Rank all plans; the series has every candidate, and the plans with a name."""
    topology = _topology(point)
    small = point.model == "small"
    config = ZeroTrain(seq_len=point.seq_len).gpt if small else paper_gpt(point.model, point.seq_len)
    # 6 FLOPs per parameter and token, 8 with recomputation.
    tokens = point.seq_len * point.micro_batch * point.accumulation
    compute = (8 if config.checkpointing else 6) * config.parameters * tokens / (point.sustained_tflops * 1e12)
    search = partial(
        zero.search,
        *(layout_of(config), topology),
        micro_batches=point.accumulation,
        cost=partial(traffic.step_seconds, compute_s=compute),
        activations=activations(config, point.micro_batch),
        gradient_bytes=2,
    )
    named = {each.plan.name: each for each in search(plans=[plan.named(name, topology) for name in NAMED])}
    largest = {name: point.memory_gb / (sum(memory.formula(named[name].plan, 10**9).values()) / 1e9) for name in NAMED}
    table = pd.DataFrame([_row(each, False) for each in search()] + [_row(named[name], True) for name in NAMED])
    table["fits"] = table.gigabytes <= point.memory_gb
    fitting = table[table.fits & ~table.named]
    metrics = ZeroPlanMetrics(
        parameters=config.parameters,
        compute_seconds=compute,
        plans=int((~table.named).sum()),
        plans_that_fit=len(fitting),
        step_seconds_best=fitting.step_seconds.min() if len(fitting) else None,
        **{f"step_seconds_{name}": each.step_s for name, each in named.items()},
        **{f"gigabytes_{name}": each.rank_bytes / 1e9 for name, each in named.items()},
        **{f"largest_{name}": billions for name, billions in largest.items()},
    )
    best = fitting.plan.iloc[0] if len(fitting) else "none"
    where = f"{point.machine}, {point.nodes} nodes, {point.model} (arithmetic)"
    return Outcome(metrics, "modelled", {"best": best}, table, where)


def _row(found: Candidate, named: bool) -> dict[str, Any]:
    """One plan of the table; bits innermost first."""
    plan = found.plan
    return {
        "plan": plan.name,
        "weights": plan.weights or "-",
        "copy": plan.secondary or "-",
        "gradients": plan.gradients or "-",
        "optimizer": plan.optimizer or "-",
        "across": plan.reduce_across,
        "step_seconds": found.step_s,
        "gigabytes": found.rank_bytes / 1e9,
        **{f"{kind}_route": _words(getattr(plan, f"{kind}_route")) for kind in ("weight", "gradient", "update")},
        "named": named,
    }


def _words(route: Route) -> str:
    return " | ".join(
        f"{'+'.join(hop)} {'INT' if bits < 16 else ''}{bits}" for hop, bits in zip(route.hops, route.bits, strict=True)
    )


def _topology(point: ZeroPlan) -> Topology:
    if point.machine == "frontier":
        return frontier(point.nodes)
    if point.machine == "emulated":
        return ZeroTrain(nodes=point.nodes).topology
    # A100: a node's two rails of 25 GB/s are shared by 4 GPUs.
    return Topology((Level("package", 1), Level("node", 4, 300e9, 2e-6), Level("cluster", point.nodes, 12.5e9, 5e-6)))
