"""Serve on all ranks, and compare with one process."""

from repro import launch
from repro.experiments.base import Outcome
from repro.experiments.flover_parallel import TIMEOUT_S, ParallelMetrics, ParallelPoint
from repro.experiments.flover_parallel.ranks import alone, serve
from repro.flover import workload
from repro.launch import network

CHECKED = 4  # requests whose tokens one process decodes again


def run(point: ParallelPoint) -> Outcome:
    """Serve on all ranks, compare their passes, and the tokens with those of one process."""
    with network.between(point.topology, point.fabric) as links:
        first, *others = launch.launch(
            *(serve, point.ranks, point),
            fabric=links.fabric,
            topology=point.topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    lone = alone(point, CHECKED)
    served = {generation.request.id: generation.tokens for generation in first.report.generations}
    metrics = ParallelMetrics(
        **workload.summary(first.report),
        ranks_agree=float(all(other.digest == first.digest for other in others)),
        tokens_equal_fraction=sum(served[g.request.id] == g.tokens for g in lone) / len(lone),
    )
    return Outcome(
        metrics=metrics,
        evidence=links.evidence,
        conditions={"fabric": links.state, "requests_checked": str(len(lone))},
        topology=point.describe(links.state),
    )
