"""The queue model at the paper's sizes: every number of a figure of the paper predicted, or a setting of your own."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, Seconds, metrics
from repro.experiments.common.serving import WINDOW
from repro.flover import paper

WINDOWS = ("dynamic", "dynamic_concurrent")  # policies that have one
_OWN = ("model", "policy", "window_s", "arrivals", "requests", "interval_ms")  # settings that a figure brings itself


class QueuePoint(Point):
    """With `figure` all of its printed numbers are predicted, at the paper's settings. Without, one setting.

    `arrivals`: at a fixed interval, or Poisson of that mean. `policy`: dynamic runs one batch at a time;
    dynamic_concurrent and instances share the machine evenly.
    """

    figure: Literal["fig4a", "fig4c", "fig7", "fig8", "progress", "reordering"] | None = Field(
        None,
        description="of the paper: fig7, fig8 of v1; reordering: v1 Fig. 9, v2 memory shuffle; others v2",
    )
    batch_cost: float | None = Field(
        None, ge=0, description="c in t_iter(b) = t1 (1 + c (b - 1)); none: the model's, read off Fig. 4(c)"
    )
    seeds: int = Field(100, ge=1, description="draws of Poisson arrivals or of lengths, averaged")
    model: Literal["gpt-j-6b", "llama-13b", "llama-33b", "llama-65b"] = "gpt-j-6b"
    policy: Literal["fused", "serial", "dynamic", "dynamic_concurrent", "instances"] = "fused"
    window_s: float = Field(0.0, ge=0, description=WINDOW)
    arrivals: Literal["fixed", "poisson"] = "poisson"
    requests: int = Field(paper.REQUESTS, ge=1)
    interval_ms: float = Field(1000 * paper.INTERVAL_S, ge=0)

    def contradictions(self) -> Iterator[str]:
        if self.window_s and self.policy not in WINDOWS:
            yield f"window_s is {self.window_s}: only the policies {' and '.join(WINDOWS)} have one"
        changed = [name for name in _OWN if getattr(self, name) != type(self).model_fields[name].default]
        if self.figure and changed:
            own = f"figure is {self.figure}, which has its own {', '.join(changed)}"
            yield f"{own}: allowed beside it: batch_cost, seeds"

    @property
    def label(self) -> str:
        cost = "" if self.batch_cost is None else f"-c{self.batch_cost:g}"
        if self.figure:
            return f"{self.figure}{cost}"
        policy = "" if self.policy == "fused" else f"-{self.policy}"
        policy += f"{self.window_s:g}s" if self.policy in WINDOWS else ""
        return f"{self.model}{policy}-{self.arrivals}-n{self.requests}-{self.interval_ms:g}ms{cost}"


_SECONDS = ("total_seconds", "serial_seconds")
_NUMBERS = ("speedup_vs_serial", "iterations", "overlap_fraction", "latency_ratio", "first_latency_ratio")


class FigureMetrics(
    metrics(Number | None, "points", "rms_relative_error", "worst_relative_error", "chi_square", "p_value"),
    metrics(Number | None, "p_value_mean_of_5", "overlap_rms_error", "speedup_rms_error", "speedup_smallest_step"),
    metrics(Number | None, "largest_gain", "baseline_rms_relative_error", "baseline_worst_relative_error"),
):
    """Of a figure, over its printed numbers that were not used for the prediction. An error is predicted ÷ printed - 1.

    fig8, over its iterations: `chi_square`, the sum of squared distances in standard deviations of a draw; `p_value`,
    the chance of one as large, and the same if a printed number were the mean of 5 draws; errors of overlap and
    speedup; the smallest factor by which the predicted speedup falls from one interval to the next. reordering: its
    `largest_gain`. `baseline_...`: errors of what fig7, progress and reordering print of FasterTransformer's instances
    and of dynamic batching.
    """


class QueueMetrics(
    FigureMetrics,
    metrics(Seconds | None, *_SECONDS, *(f"{name}_sd" for name in _SECONDS)),
    metrics(Number | None, *_NUMBERS, *(f"{name}_sd" for name in _NUMBERS)),
):
    """Of a setting: mean and standard deviation over the draws. A fixed interval has a single draw, and its deviations
    are 0. Of a figure: `FigureMetrics`."""


EXPERIMENT = Experiment(QueuePoint, QueueMetrics, conditions=("reference", "costs"), timeout_s=120, timed=False)
