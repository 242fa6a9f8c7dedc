"""Figures of hierarchical ZeRO++ (arXiv 2501.04266); the story they belong to is `notebooks/zero.ipynb`."""

from repro.report.figures.zero.choice import candidates, machines, sends, zero_choice
from repro.report.figures.zero.loss import zero_loss
from repro.report.figures.zero.runs import PLANS, Training, gains
from repro.report.figures.zero.times import (
    every_plan,
    medians,
    zero_levels,
    zero_prediction,
    zero_rates,
    zero_scaling,
    zero_step_time,
)
from repro.report.figures.zero.traffic import zero_bytes, zero_memory

__all__ = [
    "PLANS",
    "Training",
    "candidates",
    "every_plan",
    "gains",
    "machines",
    "medians",
    "sends",
    "zero_bytes",
    "zero_choice",
    "zero_levels",
    "zero_loss",
    "zero_memory",
    "zero_prediction",
    "zero_rates",
    "zero_scaling",
    "zero_step_time",
]
