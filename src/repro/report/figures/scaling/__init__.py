"""Figures of the scaling model; the story they belong to is `notebooks/scaling.ipynb`."""

from repro.report.figures.scaling.inference import scaling_experts, scaling_requests
from repro.report.figures.scaling.maps import scaling_models, scaling_networks
from repro.report.figures.scaling.marks import FRONTIER, PLANS, errors
from repro.report.figures.scaling.training import scaling_changes, scaling_gcds, scaling_ratios, scaling_tornado
from repro.report.figures.scaling.validation import scaling_plans, scaling_validation

__all__ = [
    "FRONTIER",
    "PLANS",
    "errors",
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
