"""Figures of `notebooks/scaling.ipynb`, by the part of its story that they tell."""

from repro.report.figures.scaling_inference import scaling_experts, scaling_requests
from repro.report.figures.scaling_maps import scaling_models, scaling_networks
from repro.report.figures.scaling_training import scaling_changes, scaling_gcds, scaling_ratios, scaling_tornado
from repro.report.figures.scaling_validation import scaling_plans, scaling_validation

__all__ = [
    "scaling_changes",
    "scaling_experts",
    "scaling_gcds",
    "scaling_models",
    "scaling_networks",
    "scaling_plans",
    "scaling_ratios",
    "scaling_requests",
    "scaling_tornado",
    "scaling_validation",
]
