"""Place experts by training sequences of a model's routing, and count the hops of held-out sequences."""

from typing import Literal

from pydantic import Field, model_validator

from repro.experiments.base import Experiment, HopsPerToken, Metrics, Number, Point, Seconds
from repro.experiments.common.traces import ALL, TraceName, check_domain, experts


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
    max_load_limit: float = Field(
        0.0, ge=0, description="limit on the busiest GPU's tokens over the even share; 0 = none"
    )
    bound_s: float = Field(0.0, ge=0, description="time for the semidefinite bound; 0 = the fast bounds only")

    @model_validator(mode="after")
    def _whole(self) -> "PlacementPoint":
        for name in ("train_domain", "test_domain"):
            check_domain(self.trace, name, getattr(self, name))
        count = experts(self.trace)
        if count % self.gpus:
            whole = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ValueError(f"gpus is {self.gpus}: {count} experts cannot be shared evenly; allowed: {whole}")
        if self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(f"gpus is {self.gpus}: not whole nodes of gpus_per_node {self.gpus_per_node}")
        if self.max_load_limit and (self.max_load_limit < 1 or self.method != "affinity"):
            raise ValueError(
                f"max_load_limit is {self.max_load_limit}: at least 1, and only with method affinity, "
                f"found {self.method}"
            )
        return self

    @property
    def label(self) -> str:
        nodes = f"x{self.gpus_per_node}" if self.gpus_per_node else ""
        one_text = self.train_domain == self.test_domain == ALL
        texts = "" if one_text else f"-{self.train_domain}-on-{self.test_domain}"
        load = f"-load{self.max_load_limit:g}" if self.max_load_limit else ""
        tokens = self.train_tokens or "all"
        return f"{self.trace}{texts}-{self.method}{load}-{self.gpus}gpus{nodes}-tokens{tokens}-seed{self.seed}"


class PlacementMetrics(Metrics):
    """Cost is of the held-out sequences. `train_*`, `bound` and `gap` are of the tokens placed by."""

    hops_per_token: HopsPerToken
    intra_hops: HopsPerToken
    inter_hops: HopsPerToken
    crossing_fraction: Number
    node_crossing_fraction: Number
    max_load: Number
    max_load_worst_layer: Number
    train_crossing_fraction: Number
    train_max_load_worst_layer: Number
    bound: Number
    gap: Number
    mip_gap: Number | None = None
    seconds: Seconds


EXPERIMENT = Experiment(
    parameters=PlacementPoint,
    metrics=PlacementMetrics,
    conditions=("routing", "tokens_used", "search", "time_limited"),
    timed=False,
)
