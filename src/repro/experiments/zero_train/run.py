"""Train on ranks, and turn what they saw into metrics."""

import math

import pandas as pd
import torch._dynamo  # noqa: F401  (AdamW imports it on first use: once here, not in 8 ranks at the same time)

from repro import launch, paths, quantize
from repro.baselines import systems
from repro.experiments.base import Outcome
from repro.experiments.common.ranks import LEVELS
from repro.experiments.zero_train import TIMEOUT_S, WARM_UP, ZeroTrain, ZeroTrainMetrics
from repro.experiments.zero_train.plans import layout_of, plan_of
from repro.experiments.zero_train.ranks import Report, train
from repro.launch import network
from repro.zero import Plan, traffic
from repro.zero import memory as bytes_of

LAST = 25  # steps that loss_last averages, at most a quarter of all


def run(point: ZeroTrain) -> Outcome:
    """Train, and report time, losses, bytes per level and memory. Series: a row per step."""
    topology = point.topology
    plan = None if point.plan in systems.SYSTEMS else plan_of(point)
    systems.prepare(point.plan)
    quantize.warm_up()
    corpus = paths.data("tinyshakespeare.txt").read_bytes()
    with network.between(topology, point.fabric) as links:
        reports = launch.launch(
            *(train, topology.world_size, point, plan, corpus, links.fabric),
            fabric=links.fabric,
            topology=topology,
            timeout_s=TIMEOUT_S
            - 15,  # before the experiment's: the launcher can tell a hang in a collective from slow work
            first_only=True,
        )
    table = _series(reports)
    return Outcome(
        metrics=_metrics(point, plan, table, reports, links.fabric is not None),
        evidence=links.evidence,
        conditions={"fabric": links.state},
        series=table,
        topology=point.describe(_links(point, links.state)),
    )


def _links(point: ZeroTrain, state: str) -> str:
    rates = "/".join(f"{point.cluster_mbit_s * factor:g}" for factor in (point.package_ratio, point.node_ratio, 1))
    known = {"shaped": f"{rates} Mbit/s per rank", "the machine's own": "its own network"}
    return known.get(state, "unshaped loopback")


def _series(reports: list[Report]) -> pd.DataFrame:
    """A row per step: mean loss, the slowest rank's seconds, bytes of all ranks per level (where there is a ledger)."""
    rows = []
    for number, ranks in enumerate(zip(*(report.steps for report in reports), strict=True)):
        row = {"step": number, "loss": sum(rank.loss for rank in ranks) / len(ranks)}
        row["seconds"] = max(rank.seconds for rank in ranks)
        if ranks[0].sent is not None:
            row |= {f"bytes_{level}": sum(rank.sent[level] for rank in ranks) for level in LEVELS}
        rows.append(row)
    return pd.DataFrame(rows)


def _metrics(
    point: ZeroTrain, plan: Plan | None, table: pd.DataFrame, reports: list[Report], shaped: bool
) -> ZeroTrainMetrics:
    timed, first, parameters = table[WARM_UP:], reports[0], point.gpt.parameters
    seconds = timed.seconds.median()
    alone = [report.compute_seconds for report in reports if report.compute_seconds is not None]
    optional = {"compute_seconds": max(alone)} if alone else {}
    if first.steps[0].sent is not None:
        optional |= {f"bytes_{level}": timed[f"bytes_{level}"].mean() for level in LEVELS}
    if first.wire is not None:
        optional |= {f"wire_{level}": first.wire[level] for level in LEVELS}
    if plan is not None:
        optional["predicted_state_bytes_per_rank"] = sum(bytes_of.formula(plan, parameters).values())
        if shaped and alone:  # with links of known rates, measured compute and bytes over rates bound the step
            optional["predicted_step_seconds"] = traffic.step_seconds(
                plan, layout_of(point.gpt), point.accumulation, compute_s=max(alone)
            )
    return ZeroTrainMetrics(
        step_seconds=seconds,
        tflops_per_rank=_model_flops(point) / seconds / 1e12,
        loss_first=table.loss.iloc[0],
        loss_last=table.loss.iloc[-min(LAST, math.ceil(len(table) / 4)) :].mean(),
        parameters=parameters,
        model_bytes=2 * parameters,
        state_bytes_per_rank=max(report.state_bytes for report in reports),
        **optional,
    )


def _model_flops(point: ZeroTrain) -> float:
    """FLOPs of a step of a rank without recomputation: 72 B s l h^2 (1 + s / 6h + V / 12lh) (Narayanan et al. 2021)."""
    tokens = point.micro_batch * point.accumulation * point.seq_len
    layers, hidden = point.layers, point.hidden
    extra = 1 + point.seq_len / (6 * hidden) + point.vocab / (12 * layers * hidden)
    return 72 * tokens * layers * hidden**2 * extra
