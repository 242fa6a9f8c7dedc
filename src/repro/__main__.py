"""`python -m repro`: the command line, also where the console script is not on PATH (inside Snakemake jobs)."""

from repro.cli import app

app()
