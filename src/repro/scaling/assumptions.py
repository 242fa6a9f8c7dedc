"""What no text tells of the engine behind a published step: one switch each, with its prior.

    Assumptions()                        what this package's engine does
    DEEPSPEED                            what DeepSpeed's code says it does
    Assumptions.drawn(draws, seed)       [draws] of `PRIORS`, for bands that include what is not known

All of them are inferences [INF] about arXiv 2501.04266, whose engine is not published.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from repro.scaling.machines import Interval
from repro.scaling.network import Value

Secondary = str | NDArray[np.str_]  # one of SECONDARY, or [draws] of them
SECONDARY = ("step", "micro_batch", "never")


@dataclass(frozen=True, eq=False)
class Assumptions:
    """Every field is one value, or [draws] of them. The defaults are this package's engine and kernels at their best,
    so that a prediction for it needs no argument. ValueError for an unknown `secondary` and a value out of its range.

    end_overlap        share of the messages at the end of a step (sums across nodes, new weights) that may hide behind
                       the last backward and the next forward: 0 or 1. This engine's do, layer by layer; DeepSpeed's
                       wait, Adam for the sums and the next forward for the weights
    side_by_side       of the messages of all levels but the one that takes longest, the share that runs beside that one:
                       0, level after level, to 1. This engine has a stream for each kind of message; 0.3 fitted its
                       steps on an emulated network [emulated, docs/log.md], where they are simulated now
    secondary          when the secondary copy of hpZ is refilled from all ranks: once a "step", in every "micro_batch",
                       or "never" (no hpZ). Likely "step": DeepSpeed drops the copy when it updates [CODE stage3.py].
                       Memory is counted with the copy
    scales_apart       1: the scales of quantised values travel in messages of their own, as in DeepSpeed [CODE
                       partition_parameters.py]; 0: with the data, as here
    messages           per layer and collective. Likely 1, a layer's tensors in one buffer; tensor by tensor there are
                       up to 6
    all_to_all         share of the achieved bandwidth that an all-to-all reaches, which quantised gradients use.
                       Likely 1. On LUMI, of Frontier's kind, RCCL's reach 0.6 of the NICs' rate, large all-reduces 0.9
    quantize_slowdown  seconds of quantising and restoring over those of reading and writing the bytes once. Likely 1:
                       DeepSpeed's CUDA kernels stream. Of the paper's port to AMD nothing is known
    """

    end_overlap: Value = 1.0
    side_by_side: Value = 0.3
    secondary: Secondary = "step"
    scales_apart: Value = 0.0
    messages: Value = 1.0
    all_to_all: Value = 1.0
    quantize_slowdown: Value = 1.0

    def __post_init__(self) -> None:
        if unknown := set(np.unique(self.secondary).tolist()) - set(SECONDARY):
            raise ValueError(f"secondary: found {min(unknown)!r}, allowed: {', '.join(SECONDARY)}")
        for name, low, high in (
            ("end_overlap", 0, 1),
            ("side_by_side", 0, 1),
            ("scales_apart", 0, 1),
            ("messages", 1, np.inf),
            ("all_to_all", 1e-6, 1),
            ("quantize_slowdown", 0, np.inf),
        ):
            value = np.asarray(getattr(self, name))
            if not ((value >= low) & (value <= high)).all():
                raise ValueError(f"{name}: found {value.min():g} to {value.max():g}, allowed: {low:g} to {high:g}")

    def global_gathers(self, accumulation: int) -> Value:
        """All-gathers of the weights over all ranks per step of a plan with secondary shards; the others, of two in
        every micro-batch, stay among those that hold the copy."""
        counts = (1.0, float(accumulation), 2.0 * accumulation)
        found = np.select([np.asarray(self.secondary) == name for name in SECONDARY], counts)
        return found if found.ndim else float(found)

    @classmethod
    def drawn(cls, draws: int, seed: int = 0) -> "Assumptions":
        """[draws] of every field from `PRIORS`; a random stream of its own for each."""
        return cls(**drawn(PRIORS, draws, seed))


DEEPSPEED = Assumptions(end_overlap=0.0, side_by_side=0.0, scales_apart=1.0)


@dataclass(frozen=True)
class Choice:
    """One of some values, with these probabilities."""

    values: tuple[Any, ...]
    shares: tuple[float, ...]

    def draw(self, rng: np.random.Generator, draws: int) -> NDArray[Any]:
        return rng.choice(self.values, draws, p=self.shares)

    @property
    def ends(self) -> tuple[Any, Any]:
        return self.values[0], self.values[-1]

    def __str__(self) -> str:
        return ", ".join(f"{value} ({share:.0%})" for value, share in zip(self.values, self.shares, strict=True))


@dataclass(frozen=True)
class Span:
    """From `low` to `high`, uniform; `log`: its logarithm is."""

    low: float
    high: float
    log: bool = True

    def draw(self, rng: np.random.Generator, draws: int) -> NDArray[np.float64]:
        if not self.log:
            return rng.uniform(self.low, self.high, draws)
        return np.exp(rng.uniform(np.log(self.low), np.log(self.high), draws))

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, {'log-' if self.log else ''}uniform"


Prior = Choice | Span | Interval
EVEN = (0.5, 0.5)
# For bands: what is likely, and what cannot be excluded. The default is among them, not always as the likeliest.
# docs/scaling.md prints this table.
PRIORS: dict[str, Prior] = {
    "end_overlap": Choice((0.0, 1.0), EVEN),
    "side_by_side": Choice((0.0, Assumptions().side_by_side, 1.0), (0.5, 0.25, 0.25)),
    "secondary": Choice(SECONDARY, (0.5, 0.25, 0.25)),
    "scales_apart": Choice((0.0, 1.0), EVEN),
    "messages": Interval(1, 1, 6),
    "all_to_all": Interval(0.1, 1, 1),
    "quantize_slowdown": Interval(1, 1, 20),
}
assert list(PRIORS) == [field.name for field in fields(Assumptions)]


def drawn(priors: Mapping[str, Prior], draws: int, seed: int = 0) -> dict[str, Any]:
    """[draws] of each; a random stream per name, so that leaving one out does not move the others."""
    return {name: prior.draw(np.random.default_rng([seed, *name.encode()]), draws) for name, prior in priors.items()}
