"""What every rank of scaling_step does: the probe, then a training run of every plan."""

from dataclasses import dataclass

from repro.experiments.common.probe import ranks as probe_ranks
from repro.experiments.common.probe.ranks import Case, Probe
from repro.experiments.zero_train import ZeroTrain
from repro.experiments.zero_train import ranks as zero_ranks
from repro.experiments.zero_train.ranks import Report
from repro.topology import Topology
from repro.zero import Plan


@dataclass
class Found:
    """Of one rank: the probe, and a report per plan."""

    probe: Probe
    reports: list[Report]


def probe_and_train(
    rank: int,
    world_size: int,
    topology: Topology,
    cases: list[Case],
    repeats: int,
    trainings: list[tuple[ZeroTrain, Plan]],
    corpus: bytes,
) -> Found:
    """Everything on the same ranks, in one process group."""
    probe = probe_ranks.probe(rank, world_size, topology, cases, repeats)
    reports = [zero_ranks.train(rank, world_size, point, plan, corpus, None) for point, plan in trainings]
    return Found(probe, reports)
