"""How much the expert of one layer tells about the next one's (the paper's Fig. 2), on the routing of real models."""

from pydantic import Field, model_validator

from repro.experiments._traces import ALL, TraceName, describe, domains, open_trace
from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric


class AffinityPoint(Point):
    """`seed` draws the tokens and shuffles the control."""

    trace: TraceName = "gptoss20b"
    domain: str = ALL
    tokens: int = Field(0, ge=0, description="tokens drawn at random from the trace; 0 = all")

    @model_validator(mode="after")
    def _known(self) -> "AffinityPoint":
        if self.domain not in domains(self.trace):
            raise ValueError(f"domain is {self.domain!r}: {self.trace} has {', '.join(domains(self.trace))}")
        return self


def run(point: AffinityPoint) -> Outcome:
    """Metrics are means over pairs of neighbouring layers.

    Series, rows of two kinds: `pair` (one per pair of layers: layer, bits, share, shuffled_bits, shuffled_share) and `routing`
    (the conditional routing of the middle pair: layer, from_expert, to_expert, probability).
    """
    import numpy as np
    import pandas as pd

    from repro import exflow

    source = open_trace(point.trace)
    trace = source.trace.take(source.of(point.domain))
    if point.tokens:
        trace = trace.sample(point.tokens, point.seed)
    found = exflow.measure_affinity(trace, point.seed)
    pairs = pd.DataFrame({name: getattr(found, name) for name in found.__dataclass_fields__})
    middle = len(pairs) // 2
    routing = exflow.affinity.conditional(exflow.transitions(trace))[middle]
    cells = np.indices(routing.shape).reshape(2, -1)
    matrix = {"from_expert": cells[0], "to_expert": cells[1], "probability": routing.ravel(), "layer": middle}
    series = pd.concat(
        [pairs.assign(kind="pair", layer=range(len(pairs))), pd.DataFrame(matrix).assign(kind="routing")],
        ignore_index=True,
    )
    metrics = {
        "mutual_information": Metric(value=found.bits.mean(), unit="bits"),
        "mutual_information_shuffled": Metric(value=found.shuffled_bits.mean(), unit="bits"),
        "normalized_mutual_information": Metric(value=found.share.mean(), unit="1"),
        "normalized_mutual_information_shuffled": Metric(value=found.shuffled_share.mean(), unit="1"),
    }
    conditions = {"routing": describe(point.trace, point.domain), "tokens_used": str(trace.tokens)}
    return Outcome(metrics, conditions=conditions, series=series)


def _label(point: AffinityPoint) -> str:
    return f"{point.trace}-{point.domain}-tokens{point.tokens or 'all'}"


REPORTS = """mutual_information mutual_information_shuffled normalized_mutual_information
    normalized_mutual_information_shuffled tokens_used routing"""
EXPERIMENT = Experiment(
    summary="Inter-layer expert affinity of real models: mutual information of neighbouring layers against shuffled tokens",
    parameters=AffinityPoint,
    run=run,
    label=_label,
    reports=frozenset(REPORTS.split()),
    timeout_s=300,
    timed=False,
)
