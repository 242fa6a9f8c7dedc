"""The ranks and metrics of `zero_train`, with another library's trainer."""

import torch

from repro.baselines import megatron, systems
from repro.experiments.base import MissingHardware, Outcome
from repro.experiments.common.launched import ranks_of
from repro.experiments.zero_peers import EXPERIMENT, MEGATRON, ZeroPeers
from repro.experiments.zero_train import run as training
from repro.experiments.zero_train.plans import plan_of


def run(point: ZeroPeers) -> Outcome:
    """Train, and report what `zero_train` does; `predicted_*` of a library are the arithmetic of our plan. MissingHardware
    for a library where there is no GPU."""
    if point.plan != MEGATRON:
        return training.run(point.ours)
    if not torch.cuda.is_available():
        raise MissingHardware("Megatron-FSDP runs on GPUs only, and there is none")
    with ranks_of(point, EXPERIMENT.timeout_s) as ranks:
        reports = ranks.run(_train, point)
    table = training._series(reports)
    metrics = training._metrics(point, plan_of(point.ours), table, reports, ranks.links.fabric is not None)
    return ranks.outcome(metrics, table)


def _train(rank: int, world_size: int, point: ZeroPeers) -> training.Report:
    """`zero_train`'s ranks with Megatron-FSDP among the systems. It is added here and not in `systems`: a change there
    would make all records of `zero_train` records of older code."""
    systems.SYSTEMS[point.plan] = megatron.hfsdp
    return training.train(rank, world_size, point, None)
