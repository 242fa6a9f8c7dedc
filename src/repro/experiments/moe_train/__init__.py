"""Train a GPT with a mixture of experts in every block, and follow its routing and affinity (the paper's Fig. 12)."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from repro.experiments.base import Bits, Experiment, Metrics, Nats, Number, Point, metrics

# Evaluated after so many iterations, and after the last: dense where the paper's curve falls, then every thousand.
EVALUATED = (0, 10, 20, 50, 100, 150, 200, 300, 500, 750, 1000, 1500)
EARLY, LATE = 200, 2000  # the paper's: apparent affinity until 200, spreading until 2,000


class MoeTrain(Point):
    """One training run on one process. `seed` draws weights, batches and the shuffled control."""

    experts: int = Field(8, ge=2)
    top_k: int = Field(1, ge=1, description="experts a token visits in a layer; affinity is of the first")
    layers: int = Field(8, ge=2)
    # Four models of 8 to 64 experts of these sizes, in 16 bits, are 17 MB: small enough to ship.
    hidden: int = Field(64, ge=1)
    heads: int = Field(4, ge=1)
    expert_hidden: int = Field(64, ge=1)
    balance: float = Field(0.01, ge=0, description="weight of GShard's balance loss; 0.01 is its own")
    text: Literal["shakespeare", "python", "both"] = "both"
    iterations: int = Field(4000, ge=1)
    batch: int = Field(16, ge=1, description="sequences per iteration")
    seq_len: int = Field(128, ge=2, description="tokens per sequence; a token is a byte")
    # Of 1e-3, 3e-3 and 6e-3 the one with the lowest held-out loss after 400 iterations (16 experts, Shakespeare).
    lr: float = Field(3e-3, gt=0)
    lr_warmup: int = Field(100, ge=1, description="iterations in which the learning rate rises to lr")
    eval_tokens: int = Field(32768, ge=1, description="of each text and part, at each evaluation")
    threads: int = Field(1, ge=1, description="sums of another number of threads differ in the last bits")
    device: Literal["cpu", "cuda"] = Field("cpu", description="cuda: ROCm as well; skipped where there is no GPU")

    def contradictions(self) -> Iterator[str]:
        if self.hidden % self.heads:
            yield f"hidden {self.hidden} is not divisible by {self.heads} heads"
        for name in ("hidden", "expert_hidden"):
            if self.device == "cuda" and getattr(self, name) % 8:
                yield f"{name} is {getattr(self, name)} on the device cuda: allowed multiples of 8 (grouped products)"
        if self.top_k > self.experts:
            yield f"top_k is {self.top_k}, allowed: 1 to {self.experts} (experts)"

    @property
    def evaluated(self) -> list[int]:
        """Iterations after which the routing is measured."""
        every = (*EVALUATED, *range(LATE, self.iterations, 1000), self.iterations)
        return sorted({iteration for iteration in every if iteration <= self.iterations})

    @property
    def label(self) -> str:
        gpu = "-gpu" if self.device == "cuda" else ""
        return f"{self.experts}e-top{self.top_k}-{self.text}-{self.iterations}it-seed{self.seed}{gpu}"


_BITS = ("mutual_information", "mutual_information_shuffled")
_NUMBERS = ("stay", "stay_shuffled", "busiest", "evenness", *(f"normalized_{name}" for name in _BITS))


def _followed(kind: Any, *names: str) -> tuple[type[Metrics], type[Metrics]]:
    """After all iterations, and after those that a run may not reach."""
    until = (f"{name}_{at}" for name in names for at in (EARLY, LATE))
    return metrics(kind, *(f"{name}_end" for name in names)), metrics(kind | None, *until)


class MoeTrainMetrics(*_followed(Nats, "loss"), *_followed(Bits, *_BITS), *_followed(Number, *_NUMBERS)):
    """Of held-out text of what the model trains on, after 200, 2,000 (where the run goes so far) and all iterations.
    `stay_start`: before training; `stay_peak`: the highest until 200; `stay_low`: the lowest from 200 to 2,000."""

    parameters: Number
    stay_start: Number
    stay_peak: Number
    stay_low: Number | None = None


EXPERIMENT = Experiment(MoeTrain, MoeTrainMetrics, conditions=("products",), timeout_s=4 * 3600.0, timed=False)
