"""Snakemake whose Slurm plugin asks for its jobs every second; the plugin's own pace, ten seconds and more, suits a real queue."""

import sys

import snakemake_executor_plugin_slurm as plugin
from snakemake.cli import main

plugin.Executor.next_seconds_between_status_checks = property(lambda self: 1.0, lambda self, value: None)
sys.exit(main())
