"""Placements as servers use them: replicas of experts, GPUs per token, the files that servers read."""
