"""Train on ranks, and turn what they saw into metrics."""

import math

import numpy as np
import pandas as pd
import torch._dynamo  # noqa: F401  (AdamW imports it on first use: once here, not in 8 ranks at the same time)

from repro import quantize
from repro.baselines import systems
from repro.experiments.base import Outcome
from repro.experiments.common.launched import ranks_of
from repro.experiments.zero_train import EXPERIMENT, WARM_UP, ZeroTrain, ZeroTrainMetrics
from repro.experiments.zero_train.plans import plan_of
from repro.experiments.zero_train.ranks import Report, train
from repro.scaling.step import layout_of, model_flops
from repro.zero import Plan, memory, traffic

LAST = 25  # steps that loss_last averages, at most a quarter of all


def run(point: ZeroTrain) -> Outcome:
    """Train, and report time, losses, bytes per level and memory. Series: a row per step."""
    plan = plan_of(point)
    systems.prepare(point.plan)
    quantize.warm_up()
    with ranks_of(point, EXPERIMENT.timeout_s) as ranks:
        reports = ranks.run(train, point, plan, ranks.links.fabric)
    table = _series(reports)
    return ranks.outcome(_metrics(point, plan, table, reports, ranks.links.fabric is not None), table)


def _series(reports: list[Report]) -> pd.DataFrame:
    """A row per step: mean loss, the slowest rank's seconds, bytes of all ranks per level (where there is a ledger)."""
    table = sum(report.steps for report in reports)
    table["loss"] /= len(reports)
    table["seconds"] = np.max([report.steps.seconds for report in reports], axis=0)
    return table.rename_axis("step").reset_index()


def _metrics(
    point: ZeroTrain, plan: Plan | None, table: pd.DataFrame, reports: list[Report], shaped: bool
) -> ZeroTrainMetrics:
    timed, parameters = table[WARM_UP:], point.gpt.parameters
    seconds = timed.seconds.median()
    alone = max((report.compute_seconds for report in reports if report.compute_seconds is not None), default=None)
    predicted = {}
    if plan is not None:
        predicted["predicted_state_bytes_per_rank"] = sum(memory.formula(plan, parameters).values())
        if shaped and alone:  # with links of known rates, measured compute and bytes over rates bound the step
            step = traffic.step_seconds(plan, layout_of(point.gpt), point.accumulation, compute_s=alone)
            predicted["predicted_step_seconds"] = step
    return ZeroTrainMetrics(
        step_seconds=seconds,
        compute_seconds=alone,
        tflops_per_rank=model_flops(point.gpt, point.micro_batch * point.accumulation) / seconds / 1e12,
        loss_first=table.loss.iloc[0],
        loss_last=table.loss.iloc[-min(LAST, math.ceil(len(table) / 4)) :].mean(),
        parameters=parameters,
        model_bytes=2 * parameters,
        state_bytes_per_rank=max(report.state_bytes for report in reports),
        **predicted,
        **timed.filter(like="bytes_").mean(),
        **{f"wire_{level}": nbytes for level, nbytes in reports[0].wire.items()},
    )
