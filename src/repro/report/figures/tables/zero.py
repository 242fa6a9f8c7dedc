"""Tables of the notebook on hierarchical ZeRO++."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from repro.report.figures.data import Data, paper
from repro.report.figures.tables import rounded
from repro.report.figures.zero import choice, prediction, times
from repro.report.figures.zero.runs import MEASURED, PLANS, PREDICTED, Training


def sent(data: Data) -> pd.DataFrame:
    """Payload between nodes of every plan, in units of the bytes of the 16-bit weights, the least first."""
    training = Training(data.runs("zero_train"))
    runs = training.with_batches(None)
    out = (runs.bytes_cluster / runs.model_bytes / training.setting["nodes"]).groupby(runs.plan).median()
    return out.dropna().sort_values().rename(index=PLANS).round(2).to_frame("M out of each node")


def over_bound(data: Data, *, plans: Sequence[str] = ("hierarchical", *times.RIVALS)) -> pd.DataFrame:
    """Measured step over the predicted one, by plan, micro-batches and rate."""
    training = Training(data.runs("zero_train"))
    ours = training.like(cluster_mbit_s=..., accumulation=...)
    ours = ours[ours.plan.isin(plans)]
    over = (ours[MEASURED] / ours[PREDICTED]).groupby([ours.plan.map(PLANS), ours.accumulation, ours.cluster_mbit_s])
    named = {"columns": "Mbit/s between nodes", "index": ["plan", "micro-batches"]}
    return over.median().unstack().rename_axis(**named).round(2)


def predicted_fastest(data: Data) -> pd.DataFrame:
    """The plans predicted to be the fastest: predicted and measured step."""
    training = Training(data.runs("zero_train"))
    runs = prediction.every_plan(training, training.setting["accumulation"])
    ranked = prediction.medians(runs).sort_values(PREDICTED)
    names = {"plan": "plan", PREDICTED: "predicted step (s)", MEASURED: "measured step (s)"}
    ranked = ranked.head().assign(plan=[_name(row) for _, row in ranked.head().iterrows()])
    return ranked[list(names)].rename(columns=names).round(3).set_index("plan")


def _name(run: pd.Series) -> str:
    """A plan in words, with what differs from the hierarchical plan as it is."""
    changed = times.changes(run).replace("\n", " ") if run.plan == "hierarchical" else ""
    return PLANS[run.plan] if changed in ("", "hierarchical") else f"hierarchical, {changed}"


def fastest_that_fit(data: Data) -> pd.DataFrame:
    """By arithmetic, the five fastest partitions that fit, for every model and machine."""
    modelled = choice.machines(data)
    fast = choice.candidates(modelled[modelled.accumulation == modelled.accumulation.max()])
    fast = fast[~fast.named & fast.fits & (fast.across == "step")].groupby(["model", "where"], sort=False).head(5)
    sends = [choice.sends(row) for _, row in fast.iterrows()]
    names = {"plan": "partition", "step_seconds": "step (s)", "gigabytes": "GB a rank", "sends": "sends"}
    table = fast.assign(sends=sends).set_index(["model", "where", "accumulation"])[list(names)]
    return table.rename(columns=names).round(2)


def bandwidth_alone(data: Data, *, plan: str = "hierarchical", rivals: Sequence[str] = times.RIVALS) -> Styler:
    """How many times as fast the plan is as others by bandwidth alone, and how much slower all
    communication would have to be for the paper's gain."""
    largest = choice.machines(data).set_index(["where", "accumulation"])
    largest = largest[largest.parameters == largest.parameters.max()]
    compute = largest.compute_seconds
    # Communication alone; the paper's gain is of the last two, whatever is compared.
    moving = {name: largest[f"step_seconds_{name}"] - compute for name in (plan, *rivals, "zeropp", "hierarchical")}
    whole = {PLANS[name]: (moving[name] + compute) / (moving[plan] + compute) for name in rivals}
    alone = {f"{PLANS[name]}, no compute": moving[name] / moving[plan] for name in rivals}
    published = {number.label: number.value for number in paper("ZT-1")}  # times faster than ZeRO-3
    goal = published["hierarchical"] / published["ZeRO++"]
    # The factor solves compute + factor × ZeRO++ = goal × (compute + factor × hierarchical).
    factor = (goal - 1) * compute / (moving["zeropp"] - goal * moving["hierarchical"])
    table = pd.DataFrame(whole | alone | {"slower by": factor.where(factor > 0, np.nan)})
    return rounded(table)
