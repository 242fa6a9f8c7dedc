"""What flover_parallel runs on every rank, and one process to compare with."""

from dataclasses import dataclass, field

import torch

from repro.baselines.batching import lone
from repro.experiments.common.serving import PAPER_PROMPT_TOKENS, PAPER_SHORTEST
from repro.experiments.flover_parallel import ParallelPoint
from repro.flover import workload
from repro.flover.buffers import LAYOUTS
from repro.flover.engine import Engine, ServingReport
from repro.flover.parallel import Leader, follow
from repro.flover.request import Generation, Request
from repro.flover.scheduler import Scheduler
from repro.launch.joined import place_in_job
from repro.models.llama import Llama, LlamaConfig
from repro.models.parallel import Shard


@dataclass
class Served:
    """What one rank returns: the digest of all passes, and on rank 0 the report."""

    digest: str
    report: ServingReport = field(default_factory=ServingReport)


def model(point: ParallelPoint, shard: Shard | None = None) -> Llama:
    """Random weights, the same on all ranks. Ranks of a job have a GPU each where the machine has any."""
    sizes = {name: getattr(point, name) for name in ("layers", "width", "heads", "ffn", "vocab")}
    config = LlamaConfig(**sizes, kv_heads=point.kv_heads or point.heads, context=capacity(point))
    device = "cuda" if place_in_job() is not None and torch.cuda.is_available() else "cpu"
    return Llama.random(config, point.seed, dtype=getattr(torch, point.dtype), device=device, shard=shard)


def requests(point: ParallelPoint) -> list[Request]:
    """Answers of lengths drawn uniformly, as in the paper's experiments with reordering."""
    ends = (max(1, round(tokens * point.length_scale)) for tokens in (PAPER_SHORTEST, point.longest))
    shapes = workload.uniform(point.requests, point.interval_s, PAPER_PROMPT_TOKENS, *ends, point.seed)
    return workload.requests(shapes, workload.random_prompts(shapes, point.vocab, point.seed))


def capacity(point: ParallelPoint) -> int:
    return PAPER_PROMPT_TOKENS + max(1, round(point.longest * point.length_scale))


def serve(rank: int, world_size: int, point: ParallelPoint) -> Served:
    """Serve all requests twice, the first time untimed: connections are made, memory is touched."""
    mine = model(point, Shard.of())
    if rank:
        return Served(follow(mine))
    with Leader(mine) as leader:
        _once(point, leader, requests(point)[:2])
        report = _once(point, leader, requests(point))
    return Served(leader.digest.hexdigest(), report)


def _once(point: ParallelPoint, leader: Leader, asked: list[Request]) -> ServingReport:
    scheduler = Scheduler(point.max_slots, point.requests)
    return Engine(leader, scheduler, capacity(point), layout=LAYOUTS[point.layout]).serve(asked)


def alone(point: ParallelPoint, count: int) -> list[Generation]:
    """The first `count` requests, each decoded alone in this process."""
    return lone(model(point), requests(point)[:count], capacity(point))
