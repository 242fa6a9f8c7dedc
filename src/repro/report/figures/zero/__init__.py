"""Figures of hierarchical ZeRO++ (arXiv 2501.04266); the story they belong to is `notebooks/zero.ipynb`."""
