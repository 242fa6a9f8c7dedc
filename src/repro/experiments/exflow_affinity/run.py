"""Measure the affinity of a trace."""

import numpy as np
import pandas as pd

from repro import exflow
from repro.experiments.base import Outcome
from repro.experiments.common.trace_files import open_trace
from repro.experiments.common.traces import describe
from repro.experiments.exflow_affinity import AffinityMetrics, AffinityPoint


def run(point: AffinityPoint) -> Outcome:
    """Series, rows of two kinds: `pair` (of layers: layer, bits, share, shuffled_bits, shuffled_share) and `routing`
    (the conditional routing of the middle pair: layer, from_expert, to_expert, probability)."""
    source = open_trace(point.trace, point.seed)
    trace = source.trace.take(source.of(point.domain))
    if point.tokens:
        trace = trace.sample(point.tokens, point.seed)
    found = exflow.measure_affinity(trace, point.seed)
    pairs = pd.DataFrame(vars(found))
    middle = len(pairs) // 2
    routing = exflow.affinity.conditional(exflow.transitions(trace))[middle]
    cells = np.indices(routing.shape).reshape(2, -1)
    matrix = {"from_expert": cells[0], "to_expert": cells[1], "probability": routing.ravel(), "layer": middle}
    parts = [pairs.assign(kind="pair", layer=range(len(pairs))), pd.DataFrame(matrix).assign(kind="routing")]
    metrics = AffinityMetrics(
        mutual_information=found.bits.mean(),
        mutual_information_shuffled=found.shuffled_bits.mean(),
        normalized_mutual_information=found.share.mean(),
        normalized_mutual_information_shuffled=found.shuffled_share.mean(),
    )
    conditions = {"routing": describe(point.trace, point.domain), "tokens_used": str(trace.tokens)}
    return Outcome(metrics, conditions=conditions, series=pd.concat(parts, ignore_index=True))
