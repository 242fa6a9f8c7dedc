"""Place the experts, decode on ranks, and compare with one process."""

from statistics import median

import pandas as pd

from repro import launch
from repro.baselines import deepspeed
from repro.exflow.moe.cache import KeysValues
from repro.experiments.base import MissingHardware, Outcome
from repro.experiments.common.ranks import LEVELS
from repro.experiments.moe_decode import PARTS, ROUTING, TIMEOUT_S, MoEDecodeMetrics, MoEDecodePoint, ranks
from repro.experiments.moe_decode.ranks import Report
from repro.launch import network
from repro.launch.joined import place_in_job


def run(point: MoEDecodePoint) -> Outcome:
    """Place, decode, and report times, bytes and rows. Series: a row per iteration and rank, seconds by part."""
    if point.keys_values == "shared" and place_in_job() is not None:
        raise MissingHardware(
            "keys_values shared needs memory that all ranks see; in a job ranks sit on several machines"
        )
    if point.system == "deepspeed":
        deepspeed.prepare()
    model = ranks.build(point)
    gpu = ranks.placed(point, model)
    prompts = ranks.prompts(point)
    shared = point.keys_values == "shared"
    memory = KeysValues.shared(model.config, len(prompts), point.prompt + point.new_tokens) if shared else None
    with network.between(point.topology, point.fabric) as links:
        reports = launch.launch(
            *(ranks.decode, point.ranks, point, model, gpu, prompts, memory, links.fabric),
            fabric=links.fabric,
            topology=point.topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    equal = ranks.equal_to_one_process(point, model, prompts, reports[0].tokens)
    return Outcome(
        metrics=_metrics(point, reports, equal),
        evidence=links.evidence,
        conditions={"fabric": links.state, "requests_checked": str(min(ranks.CHECKED, len(prompts)))},
        series=_series(reports),
        topology=point.describe(links.state),
    )


def _series(reports: list[Report]) -> pd.DataFrame:
    return pd.DataFrame(
        {"rank": rank, "iteration": number, "aligned": aligned, "seconds": one.seconds, **one.parts}
        for rank, report in enumerate(reports)
        for aligned, iterations in ((False, report.free), (True, report.aligned))
        for number, one in enumerate(iterations)
    )


def _metrics(point: MoEDecodePoint, reports: list[Report], equal: float) -> MoEDecodeMetrics:
    iterations = [[report.free[n] for report in reports] for n in range(len(reports[0].free))]
    aligned = [[report.aligned[n] for report in reports] for n in range(len(reports[0].aligned))]
    seconds = median(max(one.seconds for one in ranks) for ranks in iterations)
    parts = {part: median(sum(one.parts[part] for one in ranks) / len(ranks) for ranks in aligned) for part in PARTS}
    every = [one for ranks in iterations for one in ranks]
    sent = {part: sum(sum(one.sent[part].values()) for one in every) / len(iterations) for part in ROUTING}
    sent |= {level: sum(s[level] for one in every for s in one.sent.values()) / len(iterations) for level in LEVELS}
    rows, optional = sum(sum(one.rows.values()) for one in every), {}
    if rows:
        left = sum(count for one in every for level, count in one.rows.items() if level != "own")
        optional["leaving_fraction"] = left / rows
        optional["leaving_node_fraction"] = sum(one.rows["cluster"] for one in every) / rows
    return MoEDecodeMetrics(
        iteration_seconds=seconds,
        tokens_per_s=point.ranks * point.requests / seconds,
        cache_bytes_per_rank=max(report.cache_bytes for report in reports),
        tokens_equal=equal,
        routing_seconds=sum(parts[part] for part in ROUTING),
        bytes=sum(sent[level] for level in LEVELS),
        **{f"seconds_{part}": value for part, value in parts.items()},
        **{f"bytes_{name}": value for name, value in sent.items()},
        **optional,
    )
