"""Serve on all ranks, and compare with one process."""

import torch

from repro.baselines.batching import lone
from repro.experiments.base import Outcome
from repro.experiments.common.launched import gpu_of_job, ranks_of
from repro.experiments.flover_parallel import EXPERIMENT, ParallelMetrics, ParallelPoint
from repro.experiments.flover_serving.inputs import uniform
from repro.flover import paper, workload
from repro.flover.buffers import LAYOUTS
from repro.flover.engine import Engine
from repro.flover.parallel import Leader, follow
from repro.flover.report import ServingReport
from repro.flover.request import Request
from repro.flover.scheduler import Scheduler
from repro.models.llama import Llama, LlamaConfig
from repro.models.parallel import Shard

CHECKED = 4  # requests whose tokens one process decodes again


def run(point: ParallelPoint) -> Outcome:
    """Serve on all ranks, compare their passes, and the tokens with those of one process."""
    with ranks_of(point, EXPERIMENT.timeout_s) as ranks:
        (report, digest), *others = ranks.run(_serve, point)
    alone = lone(_model(point), _requests(point)[:CHECKED], _capacity(point))
    served = {generation.request.id: generation.tokens for generation in report.generations}
    metrics = ParallelMetrics(
        **workload.summary(report),
        ranks_agree=float(all(other == digest for _, other in others)),
        tokens_equal_fraction=sum(served[g.request.id] == g.tokens for g in alone) / len(alone),
    )
    return ranks.outcome(metrics, requests_checked=str(len(alone)))


def _serve(rank: int, world_size: int, point: ParallelPoint) -> tuple[ServingReport | None, str]:
    """Rank 0's report, and the digest of all passes. Two requests before that connect the ranks and touch memory."""
    model = _model(point, Shard.of())
    if rank:
        return None, follow(model)
    with Leader(model) as leader:
        for requests in (_requests(point)[:2], _requests(point)):
            scheduler = Scheduler(point.max_slots, point.requests, token_gap_s=0)
            report = Engine(leader, scheduler, _capacity(point), layout=LAYOUTS[point.layout]).serve(requests)
    return report, leader.digest.hexdigest()


def _model(point: ParallelPoint, shard: Shard | None = None) -> Llama:
    """Random weights, the same on all ranks."""
    sizes = {name: getattr(point, name) for name in ("layers", "width", "heads", "ffn", "vocab")}
    config = LlamaConfig(**sizes, kv_heads=point.kv_heads or point.heads, context=_capacity(point))
    return Llama.random(config, point.seed, dtype=getattr(torch, point.dtype), device=gpu_of_job(), shard=shard)


def _requests(point: ParallelPoint) -> list[Request]:
    shapes = uniform(point, point.interval_s)
    return workload.requests(shapes, workload.random_prompts(shapes, point.vocab, point.seed))


def _capacity(point: ParallelPoint) -> int:
    return paper.PROMPT_TOKENS + max(1, round(point.longest * point.length_scale))
