"""Place experts by training sequences of a model's routing, and count the hops of held-out sequences."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, HopsPerToken, Number, Point, Seconds, metrics
from repro.experiments.common.traces import ALL, TraceName, experts, unknown_domains


class PlacementPoint(Point):
    """`seed` splits the sequences of gpt-oss, draws the training tokens and seeds the method: an interval over seeds
    covers all three. A GPT-MoE's tokens are split by its own training text and held-out text."""

    trace: TraceName = "gptoss20b"
    train_domain: str = ALL
    test_domain: str = Field(ALL, description="of the held-out tokens")
    method: Literal["contiguous", "random", "exflow", "exflow-direct", "affinity"] = "affinity"
    gpus: int = Field(4, ge=1)
    gpus_per_node: int = Field(0, ge=0, description="0 = all GPUs in one node")
    train_tokens: int = Field(0, ge=0, description="drawn at random from the training sequences; 0 = all of them")
    time_limit_s: float = Field(30.0, gt=0, description="limit of the placement search")
    max_load_limit: float = Field(0.0, ge=0, description="busiest GPU's tokens over the even share; 0 = no limit")
    bound_s: float = Field(0.0, ge=0, description="time for the semidefinite bound; 0 = the fast bounds only")

    def contradictions(self) -> Iterator[str]:
        yield from unknown_domains(self.trace, train_domain=self.train_domain, test_domain=self.test_domain)
        count, limit = experts(self.trace), self.max_load_limit
        if count % self.gpus:
            whole = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            yield f"gpus is {self.gpus}: {count} experts cannot be shared evenly; allowed: {whole}"
        if self.gpus_per_node and self.gpus % self.gpus_per_node:
            yield f"gpus is {self.gpus}: not whole nodes of gpus_per_node {self.gpus_per_node}"
        if limit and (limit < 1 or self.method != "affinity"):
            yield f"max_load_limit is {limit}: at least 1, and only with method affinity, found {self.method}"

    @property
    def label(self) -> str:
        nodes = f"x{self.gpus_per_node}" if self.gpus_per_node else ""
        one_text = self.train_domain == self.test_domain == ALL
        texts = "" if one_text else f"-{self.train_domain}-on-{self.test_domain}"
        load = f"-load{self.max_load_limit:g}" if self.max_load_limit else ""
        tokens = self.train_tokens or "all"
        return f"{self.trace}{texts}-{self.method}{load}-{self.gpus}gpus{nodes}-tokens{tokens}-seed{self.seed}"


HOPS = ("hops_per_token", "intra_hops", "inter_hops")
SHARES = ("crossing_fraction", "node_crossing_fraction", "max_load", "max_load_worst_layer")


class PlacementMetrics(
    metrics(HopsPerToken, *HOPS),
    metrics(Number, *SHARES, "train_crossing_fraction", "train_max_load_worst_layer", "bound", "gap"),
):
    """Cost is of the held-out sequences. `train_*`, `bound` and `gap` are of the tokens placed by."""

    mip_gap: Number | None = None
    seconds: Seconds


EXPERIMENT = Experiment(
    PlacementPoint, PlacementMetrics, conditions=("routing", "tokens_used", "search", "time_limited"), timed=False
)
