"""How much the expert of one layer tells about the next one's (the paper's Fig. 2), on the routing of real models."""

from collections.abc import Iterator

from pydantic import Field

from repro.experiments.base import Bits, Experiment, Number, Point, metrics
from repro.experiments.common.traces import ALL, TraceName, unknown_domains

# Draws of the control. One alone is off by up to 1 %, more than what the jackknife says of 128 pieces of text (0.3 %);
# the mean of these by 0.1 %.
SHUFFLES = 64


class AffinityPoint(Point):
    """`seed` draws the tokens and shuffles the control."""

    trace: TraceName = "gptoss20b"
    domain: str = ALL
    tokens: int = Field(0, ge=0, description="tokens drawn at random from the trace; 0 = all")

    def contradictions(self) -> Iterator[str]:
        yield from unknown_domains(self.trace, domain=self.domain)

    @property
    def label(self) -> str:
        return f"{self.trace}-{self.domain}-tokens{self.tokens or 'all'}"


def _ends(name: str) -> tuple[str, str, str]:
    return f"{name}_low", name, f"{name}_high"


class AffinityMetrics(
    metrics(Bits, "mutual_information", "mutual_information_shuffled"),
    metrics(Number, "normalized_mutual_information", "normalized_mutual_information_shuffled"),
    metrics(Bits | None, *_ends("unbiased_mutual_information")),
    metrics(Number | None, *_ends("unbiased_normalized_mutual_information")),
):
    """Means over pairs of neighbouring layers, as counted. `*_shuffled`: of shuffled tokens, the mean of `SHUFFLES`
    draws. `unbiased_*`: without the bias that few sequences cause, and the ends of its 95 % interval, both by the
    jackknife over sequences; None for a single one."""


EXPERIMENT = Experiment(
    AffinityPoint, AffinityMetrics, conditions=("routing", "tokens_used"), timeout_s=300, timed=False
)
