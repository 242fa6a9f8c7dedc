"""Small documents of the three kinds that the project reads, and how one is read when its kind is not known."""

from collections.abc import Sequence
from pathlib import Path

from attack.fuzz import Parser

from repro.claims import document
from repro.plan import config, packing
from repro.plan.config import ConfigError

CONFIG = """\
platform: laptop
reference: laptop-2core

experiments:
  exflow_placement:
    tiers:
      laptop:
        - grid: &few { method: [contiguous, affinity], gpus: [4, 8], seed: 0 } # a comment
          repeats: 2
          minutes: 0.05
        - grid: { <<: *few, method: random }
  flover_queue:
    tiers: { smoke: [{ grid: { requests: 4 } }] }
"""
PLATFORM = """\
description: a cluster of 4 nodes
tier: laptop
memory_gb: 64
node: { packages: 4, gcds: 2, emulated: true }
slurm:
  environment: slurm/box/environment.sh
  account: abc123
  partition: batch
  constraint: "a&b"
  cores_per_rank: 7
  options: [--gpus-per-node=8, --exclusive]
  rank_options: [--gpus-per-task=1]
  part_options: ["--gpu-bind=map_gpu:{gpus}"]
  bins:
    - { nodes: 2, hours: 2 }
    - { nodes: 16, hours: 0.5 }
  running_jobs: 4
"""
CLAIMS = """\
papers:
  ZT: { title: A title, id: "2501.04266", version: v2 }
scopes:
  machine: { evidence: [measured], where: &large { nodes: { min: 48 } }, outside: few ranks show the order only }
groups:
  throughput:
    unit: "×"
    direction: higher
    comparison: relative
    tolerance: 0.15
    tolerance_reason: batch and sequence length are not published
    hardware: 48 nodes
    scope: machine
    value: { experiment: zero_train, metric: step_seconds, sampled: occasions, where: { accumulation: 4 } }
    claims:
      ZT-1:
        title: throughput
        where: abstract
        claim: "1.71 times"
        paper_value: 1.71
        tag: R
        no_effect: 1
        value: { where: { plan: zeropp }, over: { plan: hierarchical } }
"""


def seeds(folder: Path) -> Sequence[Path]:
    """A file of each kind."""
    paths = [folder / name for name in ("config.yaml", "platform.yaml", "claims.yaml")]
    for path, text in zip(paths, (CONFIG, PLATFORM, CLAIMS), strict=True):
        path.write_text(text)
    return paths


def _config(path: Path) -> object:
    found = config.load_yaml(path, config.Config)
    config.check_references(found, path)
    return found


def _platform(path: Path) -> object:
    """With all that is made of it before a job is submitted."""
    found = config.load_yaml(path, config.Platform)
    if found.slurm is None or found.node is None:
        return found
    jobs = [Step(record=f"r{nodes}", nodes=nodes) for nodes in (1, 3)]
    return found.slurm.submission, found.slurm.beginning, packing.pack(jobs, found.slurm)


class Step:
    """A point, as far as an allocation and srun ask it."""

    experiment, minutes, attempt, ranks, packages, tasks_per_node = "flover_queue", 1.0, 1, 2, 1, 2

    def __init__(self, record: str, nodes: int) -> None:
        self.record, self.nodes = record, nodes


def parse(path: Path) -> object:
    """What the file is, if any; the refusal of a configuration if none."""
    refused = []
    for read in (_config, _platform, document.read):
        try:
            return read(path)
        except ConfigError as error:
            refused.append(error)
    raise refused[0]


YAML = Parser(seeds, parse, (ConfigError,))
