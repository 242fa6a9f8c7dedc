"""Placements as servers use them: copies of experts, GPUs per token, the files that servers read."""
