"""Train a GPT with a mixture of experts in every block, and follow how its routing and its affinity develop (the paper's Fig. 12)."""

import functools
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.models.gpt_moe import GPTMoE, GPTMoEConfig

# Evaluated after so many iterations, and after the last: dense where the paper's curve falls, then every thousand.
EVALUATED = (0, 10, 20, 50, 100, 150, 200, 300, 500, 750, 1000, 1500)
EARLY, LATE = 200, 2000  # the paper's: apparent affinity until 200, spreading until 2,000
UNITS = {
    "loss": "nats",
    **{name: "1" for name in ("stay", "stay_shuffled", "busiest", "evenness")},
    **{name: "bits" for name in ("mutual_information", "mutual_information_shuffled")},
    **{name: "1" for name in ("normalized_mutual_information", "normalized_mutual_information_shuffled")},
}


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

    @model_validator(mode="after")
    def _fits(self) -> "MoeTrain":
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by {self.heads} heads")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, allowed: 1 to {self.experts} (experts)")
        return self

    @property
    def model(self) -> "GPTMoEConfig":
        """Sizes of the model."""
        from repro.models.gpt_moe import GPTMoEConfig

        names = ("experts", "top_k", "layers", "hidden", "heads", "expert_hidden", "balance", "seq_len")
        return GPTMoEConfig(**{name: getattr(self, name) for name in names})

    @property
    def evaluated(self) -> list[int]:
        """Iterations after which the routing is measured."""
        every = (*EVALUATED, *range(LATE, self.iterations, 1000), self.iterations)
        return sorted({iteration for iteration in every if iteration <= self.iterations})


@functools.lru_cache(maxsize=1)
def train(point: MoeTrain) -> "tuple[GPTMoE, pd.DataFrame]":
    """The trained model, and a row per evaluated iteration and domain: shakespeare, python, and both together.

    The last result is kept, so that after a run its very model can be saved (`data/make/gpt_moe.py`).
    """
    import pandas as pd
    import torch

    from repro.experiments import _moe_training as training

    texts = {name: training.read(name) for name in training.FILES}
    known, held_out = (
        {name: training.windows(part(text), point.eval_tokens, point.seq_len) for name, text in texts.items()}
        for part in (lambda text: text.train, lambda text: text.held_out)
    )
    rows: list[dict[str, float | str]] = []

    def look(iteration: int, model: "GPTMoE") -> None:
        seen, unseen = ({n: training.route(model, part[n]) for n in texts} for part in (known, held_out))
        seen["both"], unseen["both"] = (training.join(list(each.values())) for each in (seen, unseen))
        for domain in unseen:
            found = training.measure(seen[domain], unseen[domain], point.seed)
            rows.append({"iteration": iteration, "domain": domain, **found})

    used = [texts[name].train for name in texts if point.text in (name, "both")]
    batches = training.batches(used, point.batch, point.seq_len, point.seed)
    threads = torch.get_num_threads()
    torch.set_num_threads(point.threads)
    try:
        model = training.train(
            point.model, batches, point.iterations, point.lr, point.lr_warmup, point.seed, point.evaluated, look
        )
    finally:
        torch.set_num_threads(threads)
    return model, pd.DataFrame(rows)


def run(point: MoeTrain) -> Outcome:
    """Metrics are of held-out text of what the model trains on, after 200, 2,000 (where the run goes so far) and all iterations;
    `stay_start` before training, `stay_peak` the highest until 200, `stay_low` the lowest from 200 to 2,000. Series: what `train`
    gives."""
    model, table = train(point)
    own = table[table.domain == point.text].set_index("iteration")
    moments = {str(at): at for at in (EARLY, LATE) if at in own.index} | {"end": point.iterations}
    metrics = {
        f"{name}_{moment}": Metric(value=own.loc[at, name], unit=unit)
        for name, unit in UNITS.items()
        for moment, at in moments.items()
    }
    metrics["parameters"] = Metric(value=sum(p.numel() for p in model.parameters()), unit="1")
    metrics["stay_start"] = Metric(value=own.stay.loc[0], unit="1")
    metrics["stay_peak"] = Metric(value=own.stay.loc[1:EARLY].max(), unit="1")
    if point.iterations >= LATE:
        metrics["stay_low"] = Metric(value=own.stay.loc[EARLY:LATE].min(), unit="1")
    return Outcome(metrics, series=table)


def _label(point: MoeTrain) -> str:
    return f"{point.experts}e-top{point.top_k}-{point.text}-{point.iterations}it-seed{point.seed}"


EXPERIMENT = Experiment(
    summary="Training of a GPT with 8 to 64 experts a block: loss, balance and affinity of its routing over the iterations",
    parameters=MoeTrain,
    run=run,
    label=_label,
    reports=frozenset({f"{name}_{moment}" for name in UNITS for moment in (str(EARLY), str(LATE), "end")})
    | {"parameters", "stay_start", "stay_peak", "stay_low"},
    timeout_s=4 * 3600.0,
    timed=False,
)
