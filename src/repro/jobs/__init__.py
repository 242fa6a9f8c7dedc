"""Running: one point, one allocation of points, and what Slurm says of its jobs."""
