"""Measure the affinity of a trace."""

import numpy as np
import pandas as pd

from repro import exflow
from repro.exflow.trace import Trace
from repro.experiments.base import Outcome
from repro.experiments.common.sequences import unbiased
from repro.experiments.common.trace_files import Source, open_trace
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
        **over_sequences(source, trace),
    )
    conditions = {"routing": describe(point.trace, point.domain), "tokens_used": str(trace.tokens)}
    return Outcome(metrics, conditions=conditions, series=pd.concat(parts, ignore_index=True))


def over_sequences(source: Source, trace: Trace) -> dict[str, float | None]:
    """The metrics `unbiased_*` of a part of the source's trace."""
    tokens = source.resampled(trace)
    codes, units = pd.factorize(tokens.stratum + " " + tokens.unit.astype(str), sort=True)
    weights, strata = np.bincount(codes), np.array([unit.rpartition(" ")[0] for unit in units])
    counted = exflow.affinity.mutual_information(exflow.transitions(trace))
    left_out = exflow.affinity.without_each(trace, codes)
    found = {}
    for name, whole, parts in zip(("", "normalized_"), counted, left_out, strict=True):
        numbers = unbiased(whole.mean(), parts.mean(axis=1), weights, strata)
        for end, number in zip(("", "_low", "_high"), numbers, strict=True):
            found[f"unbiased_{name}mutual_information{end}"] = number if np.isfinite(number) else None
    return found
