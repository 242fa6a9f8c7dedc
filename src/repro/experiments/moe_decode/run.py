"""Place the experts, decode on ranks, and compare with one process."""

import copy
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from repro import exflow, paths
from repro.baselines import deepspeed, deepspeed_moe
from repro.comm.communicator import Communicator
from repro.exflow.evaluate import loads
from repro.exflow.levels import make_levels
from repro.exflow.moe import Decoder
from repro.exflow.moe.cache import KeysValues
from repro.exflow.moe.meter import Iteration
from repro.exflow.recording import record_routing
from repro.exflow.serving import eplb
from repro.exflow.serving.online import place_for_hops, place_near
from repro.exflow.serving.slots import physical_to_logical
from repro.experiments.base import MissingHardware, Outcome
from repro.experiments.common.launched import gpu_of_job, ranks_of
from repro.experiments.common.ranks import LEVELS
from repro.experiments.common.texts import FILES, read, slices
from repro.experiments.common.traces import ROUNDS
from repro.experiments.moe_decode import (
    ALL_TO_ALL,
    EXPERIMENT,
    PARTS,
    ROUTING,
    SIZES,
    WARM_UP,
    MoEDecodeMetrics,
    MoEDecodePoint,
)
from repro.launch.joined import place_in_job
from repro.models import gpt_moe_checkpoint
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig, generate

CHECKED = 16  # requests whose tokens one process decodes again
COSTS = (1.0, 4.0, 16.0)  # of a row over the levels, for the placement: what they take on links of 16 : 4 : 1


@dataclass
class Report:
    """What one rank returns."""

    tokens: Tensor
    free: list[Iteration]
    aligned: list[Iteration]
    cache_bytes: int


def run(point: MoEDecodePoint) -> Outcome:
    """Place, decode, and report times, bytes and rows. Series: a row per iteration and rank, seconds by part."""
    if point.one_machine and place_in_job() is not None:
        raise MissingHardware("keys_values shared needs memory that all ranks see; a job's sit on several machines")
    if point.system == "deepspeed":
        deepspeed.prepare()
    model = _build(point)
    placed = _placed(point, model)
    held_out = [read(name).held_out for name in FILES]
    prompts = list(_drawn(held_out, point.ranks * point.requests, point.prompt, [point.seed, 1]))
    stored = point.prompt + point.new_tokens
    every = torch.ones(len(prompts), dtype=torch.bool)
    memory = KeysValues(model.config, every, stored).share_memory() if point.one_machine else None
    with ranks_of(point, EXPERIMENT.timeout_s) as started:
        reports = started.run(_decode, point, model, placed, prompts, memory)
    equal = _same_as_one_process(point, model, prompts, reports[0].tokens)
    metrics = _metrics(point, reports, sum(equal) / len(equal))
    return started.outcome(metrics, _series(reports), requests_checked=str(len(equal)))


def _build(point: MoEDecodePoint) -> GPTMoE:
    """The shipped model of as many experts, or one with random weights."""
    dtype = getattr(torch, point.dtype)
    if point.weights == "trained":
        model = gpt_moe_checkpoint.load(paths.data(f"gpt_moe_{point.experts}e.safetensors"))
        return model.to(gpu_of_job(), dtype)
    sizes = {name: getattr(point, name) for name in ("experts", *SIZES)} | {"kv_heads": point.kv_heads or None}
    config = GPTMoEConfig(**sizes, seq_len=max(128, point.prompt + point.new_tokens))
    torch.manual_seed(point.seed)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 64 experts of the paper's sizes are 52 GB in fp32: made as and where they are used
    try:
        with torch.device(gpu_of_job()):
            return GPTMoE(config).eval()
    finally:
        torch.set_default_dtype(default)


def _drawn(texts: list[Tensor], count: int, length: int, seed: list[int]) -> Tensor:
    """int64 [count, length]: slices of the texts in turn, from drawn places."""
    draw = np.random.default_rng(seed)
    whole = [texts[number % len(texts)] for number in range(count)]
    return torch.cat([slices(text, [int(draw.integers(len(text) - length))], length) for text in whole])


def _placed(point: MoEDecodePoint, model: GPTMoE) -> exflow.Replicas:
    """Slots of all ranks, filled by the routing of `profile_tokens` of training text."""
    length = min(128, model.config.seq_len)
    train = [read(name).train for name in FILES]
    rows = _drawn(train, max(1, point.profile_tokens // length), length, [point.seed, 2])
    with torch.no_grad(), record_routing(model) as recording:
        model(rows.to(model.head.weight.device))
    counts, machine = exflow.transitions(recording.trace().top(1)), point.topology
    slots = point.experts + point.extra_slots * point.ranks
    if point.placement == "eplb":
        filled, _, _ = eplb.rebalance_experts(loads(counts), slots, 1, point.nodes, point.ranks)
    elif point.placement == "joint":
        load, levels = loads(counts), make_levels(machine, costs=COSTS)
        if point.system == "coherent":
            filled = place_for_hops(load, counts, slots, levels, rounds=ROUNDS, seed=point.seed)
        else:
            filled = place_near(load, slots, levels)
    else:
        placed = exflow.place(counts, machine, method=point.placement, seed=point.seed, rounds=ROUNDS, costs=COSTS)
        filled = physical_to_logical(placed.gpu)
    return exflow.Replicas(filled, point.ranks, point.ranks // point.nodes)


def _decode(
    rank: int,
    world_size: int,
    point: MoEDecodePoint,
    model: GPTMoE,
    placed: exflow.Replicas,
    prompts: list[Tensor],
    memory: KeysValues | None,
) -> Report:
    """One rank: decode everything twice, as fast as it goes, and with all ranks meeting before each exchange."""
    model = copy.deepcopy(model)  # the decoder keeps its own experts only; the whole model is compared with afterwards
    agreed = torch.from_numpy(placed.physical_to_logical).to(gpu_of_job())
    dist.broadcast(agreed, 0)  # in a job every rank has searched, and a search that its time limit cut may differ
    placed = replace(placed, physical_to_logical=agreed.cpu().numpy())
    communicator = Communicator(point.topology, device=gpu_of_job())
    if point.system == "deepspeed":
        decoder = deepspeed_moe.DeepSpeedDecoder(model, communicator)
    else:
        decoder = Decoder(model, placed, communicator, point.system, point.keys_values, memory)
    tokens = decoder.generate(prompts, point.new_tokens)
    free, decoder.meter.iterations = decoder.meter.iterations[WARM_UP:], []
    decoder.meter.aligned = True
    decoder.generate(prompts, point.new_tokens)
    return Report(tokens.cpu(), free, decoder.meter.iterations[WARM_UP:], decoder.cache.nbytes)


def _same_as_one_process(point: MoEDecodePoint, model: GPTMoE, prompts: list[Tensor], tokens: Tensor) -> list[bool]:
    """Of a sample of requests, whether one process without any cache gives the same `tokens`, [requests, new_tokens]."""
    chosen = np.linspace(0, len(prompts) - 1, min(CHECKED, len(prompts))).astype(int).tolist()
    device = model.head.weight.device
    return [torch.equal(generate(model, prompts[r].to(device), point.new_tokens).cpu(), tokens[r]) for r in chosen]


def _series(reports: list[Report]) -> pd.DataFrame:
    return pd.DataFrame(
        {"rank": rank, "iteration": number, "aligned": aligned, "seconds": one.seconds, **one.parts}
        for rank, report in enumerate(reports)
        for aligned, iterations in ((False, report.free), (True, report.aligned))
        for number, one in enumerate(iterations)
    )


def _metrics(point: MoEDecodePoint, reports: list[Report], equal: float) -> MoEDecodeMetrics:
    iterations = list(zip(*(report.free for report in reports), strict=True))
    aligned = list(zip(*(report.aligned for report in reports), strict=True))
    seconds = median(max(one.seconds for one in ranks) for ranks in iterations)
    parts = {part: median(sum(one.parts[part] for one in ranks) / len(ranks) for ranks in aligned) for part in PARTS}
    every = [one for ranks in iterations for one in ranks]
    sent = {part: sum(sum(one.sent[part].values()) for one in every) / len(iterations) for part in ROUTING}
    sent |= {level: sum(s[level] for one in every for s in one.sent.values()) / len(iterations) for level in LEVELS}
    rows, left = sum(sum(one.rows.values()) for one in every), dict[str, float]()
    if rows:
        leaving = sum(count for one in every for level, count in one.rows.items() if level != "own")
        left["leaving_fraction"] = leaving / rows
        left["leaving_node_fraction"] = sum(one.rows["cluster"] for one in every) / rows
        taken = np.array([[[n for _, n in sorted(one.computed.items())] for one in ranks] for ranks in iterations])
        left["max_load"] = float((taken.max(axis=1) / taken.mean(axis=1)).mean())
    return MoEDecodeMetrics(
        iteration_seconds=seconds,
        tokens_per_s=point.ranks * point.requests / seconds,
        cache_bytes_per_rank=max(report.cache_bytes for report in reports),
        tokens_equal=equal,
        routing_seconds=sum(parts[part] for part in ROUTING),
        all_to_all_share=_all_to_all_share([one for report in reports for one in report.aligned]),
        all_to_all_share_waiting=_all_to_all_share(every),
        bytes=sum(sent[level] for level in LEVELS),
        **{f"seconds_{part}": value for part, value in parts.items()},
        **{f"bytes_{name}": value for name, value in sent.items()},
        **left,
    )


def _all_to_all_share(iterations: list[Iteration]) -> float:
    """Of the seconds of these iterations, those in all-to-alls. Aligned ones know which seconds are waiting: without."""
    spent = sum(one.parts[part] for one in iterations for part in ALL_TO_ALL)
    return spent / sum(one.seconds - one.parts["wait"] for one in iterations)
