"""How much the expert of one layer tells about the next one's (the paper's Fig. 2), on the routing of real models."""

from pydantic import Field, model_validator

from repro.experiments.base import Bits, Experiment, Metrics, Number, Point
from repro.experiments.common.traces import ALL, TraceName, check_domain


class AffinityPoint(Point):
    """`seed` draws the tokens and shuffles the control."""

    trace: TraceName = "gptoss20b"
    domain: str = ALL
    tokens: int = Field(0, ge=0, description="tokens drawn at random from the trace; 0 = all")

    @model_validator(mode="after")
    def _known(self) -> "AffinityPoint":
        check_domain(self.trace, "domain", self.domain)
        return self

    @property
    def label(self) -> str:
        return f"{self.trace}-{self.domain}-tokens{self.tokens or 'all'}"


class AffinityMetrics(Metrics):
    """Means over pairs of neighbouring layers."""

    mutual_information: Bits
    mutual_information_shuffled: Bits
    normalized_mutual_information: Number
    normalized_mutual_information_shuffled: Number


EXPERIMENT = Experiment(
    parameters=AffinityPoint, metrics=AffinityMetrics, conditions=("routing", "tokens_used"), timeout_s=300, timed=False
)
