"""Predict the totals of every policy on the paper's GPUs."""

import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.scaling_serving import POLICIES, ScalingServing, ScalingServingMetrics
from repro.flover import queueing
from repro.flover.queueing.cost import AUTHORS
from repro.scaling import serving
from repro.scaling.network import Value
from repro.scaling.whatif import bands


def run(point: ScalingServing) -> Outcome:
    """Bands of the totals and of the speedups; the series has 1, 2, 4 … `requests` requests."""
    model, gpus = serving.PAPER[point.model]
    machine = serving.machine_of(gpus, draws=point.draws, seed=point.seed)
    policies = {
        "fused": AUTHORS,
        "serial": queueing.Fused(slots=1),
        "instances": queueing.Instances(),
    }

    def total(policy: str, requests: int) -> Value:
        return serving.total_seconds(model, machine, policies[policy], requests, point.interval_ms / 1000)

    rows, last, seconds = [], {}, {}
    for requests in sorted({2**i for i in range(point.requests.bit_length())} | {point.requests}):
        last = {name: total(name, requests) for name in POLICIES}
        seconds = bands({f"seconds_{name}": value for name, value in last.items()})
        rows.append({"requests": requests} | seconds)
    found = {f"speedup_over_{name}": last[name] / last["fused"] for name in POLICIES[1:]}
    metrics = ScalingServingMetrics(**seconds, **bands(found | {"single_request_s": total("serial", 1)}))
    return Outcome(metrics, "modelled", series=pd.DataFrame(rows), topology=f"{gpus} A100-80GB (arithmetic)")
