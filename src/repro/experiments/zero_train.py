"""Train a small GPT under a ZeRO plan on real ranks, over the emulated three-level network where the machine allows it."""

import contextlib
import ctypes
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from repro.experiments.base import Experiment, Outcome, Point
from repro.record import Metric

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from repro.fabric import Fabric
    from repro.topology import Topology
    from repro.zero import Plan

WARM_UP = 2  # steps that are not timed: first connections, FSDP's lazy initialisation, allocator
LAST = 5  # steps that loss_last averages
LEVELS = ("package", "node", "cluster")
TIMEOUT_S = 1800.0


class ZeroTrain(Point):
    """One training run. Ranks: nodes * packages * gcds."""

    plan: Literal["ddp", "zero3", "zeropp", "hierarchical", "hierarchical_fp"] = "hierarchical"
    nodes: int = Field(2, ge=1)
    packages: int = Field(2, ge=1, description="GPU packages per node")
    gcds: int = Field(2, ge=1, description="ranks per package")
    # 3.3 M parameters and 32 tokens: the smallest step in which 8 ranks on 2 cores still move megabytes, so that the
    # network decides and not the compute.
    layers: int = Field(4, ge=1)
    hidden: int = Field(256, ge=1)
    heads: int = Field(4, ge=1)
    seq_len: int = Field(32, ge=1)
    micro_batch: int = Field(1, ge=1, description="sequences per rank and backward")
    accumulation: int = Field(1, ge=1, description="backward passes per step")
    steps: int = Field(10, ge=WARM_UP + 1)
    lr: float = Field(1e-3, gt=0)
    # Without a warm-up Adam's first, still badly known second moments throw the loss from 3.5 to 7 within a step, at
    # other steps in other plans: the curves would then compare accidents (docs/log.md).
    lr_warmup: int = Field(20, ge=1, description="steps in which the learning rate rises to lr")
    # Rate of the inter-node link per rank with all ranks busy, Mbit/s; package and node links are 16 and 4 times as fast,
    # as on Frontier. 8 ranks on 2 cores push 400 to 900 Mbit/s each without shaping, so at 25 even the package link (400)
    # is decided by the shaper and not by the cores: all three rates are exact and the ratio of 16:4:1 holds.
    cluster_mbit_s: float = Field(25.0, gt=0)
    fabric: Literal["auto", "unshaped"] = "auto"


@dataclass
class _Step:
    """What one rank saw of one step."""

    loss: float
    seconds: float
    sent: dict[str, int]


@dataclass
class _Report:
    """What one rank returns. `wire`: kernel counters per timed step, from rank 0 on a shaped network only."""

    steps: list[_Step]
    state_bytes: int
    wire: dict[str, float] | None


def run(point: ZeroTrain) -> Outcome:
    """Train, and report time, losses, bytes per level and memory."""
    import torch._dynamo  # noqa: F401  (AdamW imports it on first use: once here, not in 8 ranks at the same time)

    from repro import fabric, launch, paths
    from repro.zero import memory, plan

    topology = _topology(point)
    chosen = plan.named(point.plan, topology)
    corpus = paths.data("tinyshakespeare.txt").read_bytes()
    reason = "asked for" if point.fabric == "unshaped" else fabric.unavailable()
    with contextlib.nullcontext() if reason else fabric.Fabric(topology) as network:
        # The launcher's limit comes first: it can tell a hang in a collective from slow work.
        patience = TIMEOUT_S - 15
        reports = launch.launch(
            _train, topology.world_size, point, chosen, corpus, network, fabric=network, timeout_s=patience
        )
    predicted = sum(memory.formula(chosen, _config(point).parameters).values())
    return Outcome(
        metrics=_metrics(point, reports, predicted),
        evidence="measured" if reason else "emulated",
        conditions={"fabric": f"unshaped: {reason}" if reason else "shaped"},
        series=_series(reports),
        topology=_describe(point, shaped=reason is None),
    )


def _topology(point: ZeroTrain) -> "Topology":
    from repro.topology import frontier, scaled

    return scaled(frontier(point.nodes, point.packages, point.gcds), point.cluster_mbit_s * 1e6 / 8)


def _describe(point: ZeroTrain, shaped: bool) -> str:
    rates = "/".join(f"{point.cluster_mbit_s * factor:g}" for factor in (16, 4, 1))
    links = f"{rates} Mbit/s per rank" if shaped else "unshaped loopback"
    return f"{point.nodes} nodes x {point.packages} packages x {point.gcds} GCDs, {links}"


def _config(point: ZeroTrain) -> Any:
    from repro.models.gpt import GPTConfig

    return GPTConfig(layers=point.layers, hidden=point.hidden, heads=point.heads, seq_len=point.seq_len)


def _train(
    rank: int, world_size: int, point: ZeroTrain, plan: "Plan", corpus: bytes, network: "Fabric | None"
) -> _Report:
    """One rank: bf16 weights and gradients, fp32 masters and moments, as in the paper (M = 2 psi)."""
    import torch
    import torch.distributed as dist

    from repro.models.gpt import GPT
    from repro.zero import ZeroOptimizer

    _keep_freed_memory()
    torch.manual_seed(point.seed)  # equal weights on all ranks: no broadcast over the slow network
    model = GPT(_config(point))
    optimizer = ZeroOptimizer(
        model,
        plan,
        torch.optim.AdamW,
        gradient_dtype=torch.bfloat16,
        max_grad_norm=1.0,
        broadcast=False,
        lr=point.lr,
        fused=True,
    )
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / point.lr_warmup, 1.0, point.lr_warmup - 1)
    text = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
    steps, held, before = [], dict[str, int](), None
    for step in range(point.steps):
        if step == WARM_UP:
            before = _wire(rank, network)
        batches = _batch(text, point, step, rank).split(point.micro_batch)
        dist.barrier()
        start, total = time.perf_counter(), 0.0
        for rows in batches:
            loss = model(rows[:, :-1], rows[:, 1:]) / len(batches)
            loss.backward()
            total += loss.item()
        held = {kind: max(nbytes, held.get(kind, 0)) for kind, nbytes in optimizer.held_bytes().items()}
        optimizer.step()
        steps.append(_Step(total, time.perf_counter() - start, optimizer.ledger.take()))
        warm_up.step()
    after = _wire(rank, network)
    wire = {level: (after[level] - before[level]) / (point.steps - WARM_UP) for level in after} if after else None
    return _Report(steps, sum(held.values()), wire)


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed buffers: given back to the kernel, they cost 8000 page faults per step, a fifth of its time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def _wire(rank: int, network: "Fabric | None") -> dict[str, int] | None:
    """Kernel counters while no rank sends anything."""
    import torch.distributed as dist

    dist.barrier()
    counters = network.counters() if network is not None and rank == 0 else None
    dist.barrier()
    return counters


def _batch(text: "Tensor", point: ZeroTrain, step: int, rank: int) -> "Tensor":
    """Random slices of the text for one step of one rank, int64 [accumulation * micro_batch, seq_len + 1]: tokens, then target."""
    import numpy as np
    import torch

    (seed,) = np.random.SeedSequence([point.seed, step, rank]).generate_state(1).tolist()
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - point.seq_len, (point.accumulation * point.micro_batch,), generator=draw)
    return torch.stack([text[start : start + point.seq_len + 1] for start in starts]).long()


def _series(reports: list[_Report]) -> "pd.DataFrame":
    """A row per step: mean loss, the slowest rank's seconds, bytes of all ranks per level."""
    import pandas as pd

    rows = []
    for number, ranks in enumerate(zip(*(report.steps for report in reports), strict=True)):
        row = {"step": number, "loss": sum(rank.loss for rank in ranks) / len(ranks)}
        row["seconds"] = max(rank.seconds for rank in ranks)
        row |= {f"bytes_{level}": sum(rank.sent[level] for rank in ranks) for level in LEVELS}
        rows.append(row)
    return pd.DataFrame(rows)


def _metrics(point: ZeroTrain, reports: list[_Report], predicted: float) -> dict[str, Metric]:
    table, parameters = _series(reports), _config(point).parameters
    timed = table[WARM_UP:]
    metrics = {
        "step_seconds": Metric(value=timed.seconds.median(), unit="s"),
        "loss_first": Metric(value=table.loss.iloc[0], unit="nats"),
        "loss_last": Metric(value=table.loss.iloc[-LAST:].mean(), unit="nats"),
        "model_bytes": Metric(value=2 * parameters, unit="bytes"),
        "state_bytes_per_rank": Metric(value=max(report.state_bytes for report in reports), unit="bytes"),
        "predicted_state_bytes_per_rank": Metric(value=predicted, unit="bytes"),
        "parameters": Metric(value=parameters, unit="1"),
    }
    for level in LEVELS:
        metrics[f"bytes_{level}"] = Metric(value=timed[f"bytes_{level}"].mean(), unit="bytes")
        if (wire := reports[0].wire) is not None:
            metrics[f"wire_{level}"] = Metric(value=wire[level], unit="bytes")
    return metrics


def label(point: ZeroTrain) -> str:
    """Short name of a point for its record file."""
    shape = f"{point.nodes}x{point.packages}x{point.gcds}"
    return f"{point.plan}-{shape}-{point.steps}steps" + ("-unshaped" if point.fabric == "unshaped" else "")


REPORTS = """step_seconds loss_first loss_last parameters model_bytes state_bytes_per_rank predicted_state_bytes_per_rank
    bytes_package bytes_node bytes_cluster wire_package wire_node wire_cluster fabric"""
EXPERIMENT = Experiment(
    summary="Step time, bytes per level, losses and memory of DDP, ZeRO-3, ZeRO++ and hierarchical ZeRO++",
    parameters=ZeroTrain,
    run=run,
    label=label,
    reports=frozenset(REPORTS.split()),
    ranks=lambda point: point.nodes * point.packages * point.gcds,
    timeout_s=TIMEOUT_S,
)
