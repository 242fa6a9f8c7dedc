"""Figures of the scaling model; the story they belong to is `notebooks/scaling.ipynb`."""
