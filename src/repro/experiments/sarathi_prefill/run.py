"""Time passes, or serve requests under each policy, in turns on one model."""

import torch

from repro.experiments.base import Outcome
from repro.experiments.flover_serving import ServingPoint, inputs
from repro.experiments.sarathi_prefill import PrefillPoint, piggyback, throughput


def run(point: PrefillPoint) -> Outcome:
    """Series: a row per turn (piggyback), or per policy and pass over the requests (throughput)."""
    served = ServingPoint(model=point.model, dtype=point.dtype, seed=point.seed)
    model = inputs.model(served)
    measured = {"piggyback": piggyback.measured, "throughput": throughput.measured}[point.measures]
    metrics, series = measured(point, model)
    conditions = {
        "weights": inputs.weights(served),
        "threads": f"{torch.get_num_threads()}",
        "kernels": model.kernels.name,
    }
    return Outcome(metrics, conditions=conditions, series=series)
