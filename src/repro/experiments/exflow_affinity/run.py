"""Measure the affinity of a trace."""

import numpy as np
import pandas as pd

from repro import exflow
from repro.exflow.trace import Trace
from repro.experiments.base import Outcome
from repro.experiments.common import sequences
from repro.experiments.common.trace_files import Source, open_trace
from repro.experiments.common.traces import describe
from repro.experiments.exflow_affinity import SHUFFLES, AffinityMetrics, AffinityPoint


def run(point: AffinityPoint) -> Outcome:
    """Series, rows of three kinds: `pair` (of layers: layer, bits, share, shuffled_bits, shuffled_share), `routing`
    (the conditional routing of the middle pair: layer, from_expert, to_expert, probability) and `unit`
    (`over_sequences`)."""
    source = open_trace(point.trace, point.seed)
    trace = source.trace.take(source.of(point.domain))
    if point.tokens:
        trace = trace.sample(point.tokens, point.seed)
    found = exflow.measure_affinity(trace, point.seed, SHUFFLES)
    pairs = pd.DataFrame(vars(found))
    middle = len(pairs) // 2
    routing = exflow.affinity.conditional(exflow.transitions(trace))[middle]
    cells = np.indices(routing.shape).reshape(2, -1)
    matrix = {"from_expert": cells[0], "to_expert": cells[1], "probability": routing.ravel(), "layer": middle}
    parts = [pairs.assign(kind="pair", layer=range(len(pairs))), pd.DataFrame(matrix).assign(kind="routing")]
    interval, units = over_sequences(source, trace, found.shuffled_bits.mean())
    parts.append(units.assign(kind="unit"))
    metrics = AffinityMetrics(
        mutual_information=found.bits.mean(),
        mutual_information_shuffled=found.shuffled_bits.mean(),
        normalized_mutual_information=found.share.mean(),
        normalized_mutual_information_shuffled=found.shuffled_share.mean(),
        **interval,
    )
    conditions = {"routing": describe(point.trace, point.domain), "tokens_used": str(trace.tokens)}
    return Outcome(metrics, conditions=conditions, series=pd.concat(parts, ignore_index=True))


def over_sequences(source: Source, trace: Trace, shuffled_bits: float) -> tuple[dict[str, float | None], pd.DataFrame]:
    """The metrics `unbiased_*` of a part of the source's trace, and rows of `stratum`, `unit` (see `common.sequences`),
    the pseudo-value of the bits, `information`, and what shuffled tokens have, `shuffled_information`: one number, the
    mean of `SHUFFLES` draws. The interval of their ratio leaves its error out."""
    tokens = source.resampled(trace)[["stratum", "unit"]]
    units = tokens.value_counts(sort=False).rename("tokens").reset_index()  # sorted
    number = tokens.groupby(["stratum", "unit"]).ngroup().to_numpy()
    whole = exflow.affinity.mutual_information(exflow.transitions(trace))
    left_out = exflow.affinity.without_each(trace, number)
    weights, strata, found = units.tokens.to_numpy(), units.stratum.to_numpy(), {}
    for name, value, parts in zip(("", "normalized_"), whole, left_out, strict=True):
        numbers = sequences.unbiased(value.mean(), parts.mean(axis=1), weights, strata)
        for end, number in zip(("", "_low", "_high"), numbers, strict=True):
            found[f"unbiased_{name}mutual_information{end}"] = number if np.isfinite(number) else None
    information = sequences.pseudo_values(whole[0].mean(), left_out[0].mean(axis=1), strata)
    return found, units.assign(information=information, shuffled_information=shuffled_bits)
