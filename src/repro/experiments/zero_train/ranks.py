"""What every rank of zero_train does: train, and note losses, times, bytes and memory."""

import ctypes
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

from repro.baselines import systems
from repro.baselines.trainer import Trainer, Training
from repro.emulate.netns import Fabric
from repro.experiments.common import texts
from repro.experiments.common.launched import timed
from repro.experiments.zero_train import WARM_UP, ZeroTrain
from repro.models.gpt import GPT
from repro.zero import Plan, ZeroOptimizer

# Above this the model never exists as a whole on a rank, and no compute time is measured alone.
LARGE_PARAMETERS = 200_000_000
MAX_GRAD_NORM = 1.0

Batch = tuple[Tensor, Tensor]  # tokens and targets, int64 [micro_batch, seq_len]


@dataclass
class Report:
    """What one rank returns. `steps`: a row per step with loss, seconds and, where there is a ledger, bytes sent over each
    level. `wire`: kernel counters by level per timed step, from rank 0 on a shaped network only."""

    steps: pd.DataFrame
    state_bytes: int
    compute_seconds: float | None
    wire: dict[str, float]


def train(rank: int, world_size: int, point: ZeroTrain, plan: Plan | None, network: Fabric | None = None) -> Report:
    """One rank: 16-bit weights and gradients, fp32 masters and moments, as in the paper (M = 2 psi)."""
    _keep_freed_memory()
    text = texts.whole("shakespeare")
    small = point.gpt.parameters <= LARGE_PARAMETERS
    compute = _compute_seconds(point, _batches(text, point, 0, rank)) if small else None
    trainer = _trainer(point, plan)
    warm_up = torch.optim.lr_scheduler.LinearLR(
        trainer.optimizer, 1 / point.lr_warmup, 1.0, max(1, point.lr_warmup - 1)
    )
    ledger = getattr(trainer.optimizer, "ledger", None)
    steps, held, before = [], dict[str, int](), {}
    for step in range(point.steps):
        if step == WARM_UP:
            before = _wire(rank, network)
        loss, seconds = timed(partial(trainer.step, _batches(text, point, step, rank)))
        sent = ledger.take() if ledger else {}
        steps.append({"loss": loss, "seconds": seconds} | {f"bytes_{level}": count for level, count in sent.items()})
        held = {kind: max(nbytes, held.get(kind, 0)) for kind, nbytes in trainer.held_bytes().items()}
        warm_up.step()
    after = _wire(rank, network)
    wire = {level: (after[level] - before[level]) / (point.steps - WARM_UP) for level in after}
    return Report(pd.DataFrame(steps), sum(held.values()), compute, wire)


def _trainer(point: ZeroTrain, plan: Plan | None) -> Trainer:
    torch.manual_seed(point.seed)  # equal weights on all ranks: no broadcast over the slow network
    large = point.gpt.parameters > LARGE_PARAMETERS
    with torch.device("meta" if large else "cpu"):
        model = GPT(point.gpt)
    if not large:
        model.to(_device())
    options = {"lr": point.lr, "fused": True}
    training = Training(options, MAX_GRAD_NORM, getattr(torch, point.dtype), model.init_weights)
    if plan is None:
        return systems.SYSTEMS[point.plan](model, point.topology, training)
    return _Zero(model, plan, training)


class _Zero(Trainer):
    """Our engine."""

    def __init__(self, model: GPT, plan: Plan, training: Training) -> None:
        optimizer = ZeroOptimizer(
            model,
            plan,
            torch.optim.AdamW,
            weight_dtype=training.dtype,
            gradient_dtype=training.dtype if training.dtype != torch.float16 else torch.float32,
            max_grad_norm=training.max_grad_norm,
            init=training.init,
            device=_device(),
            broadcast=False,
            **training.adamw,
        )
        super().__init__(model, optimizer, _device())

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def _count(self) -> dict[str, int]:
        return self.optimizer.held_bytes()

    def _update(self) -> None:
        self.optimizer.step()


def _compute_seconds(point: ZeroTrain, batches: list[Batch]) -> float:
    """Median seconds of a step's forward and backward passes without communication, all ranks at the same time."""
    model = GPT(point.gpt).to(_device(), getattr(torch, point.dtype))

    def passes() -> None:
        for batch in batches:
            model(*(tensor.to(_device()) for tensor in batch)).backward()

    seconds = []
    for _ in range(5):
        seconds.append(timed(passes)[1])
        model.zero_grad(set_to_none=True)
    return sorted(seconds[2:])[1]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _keep_freed_memory() -> None:
    """Tell glibc to reuse freed buffers: given back to the kernel they cost page faults, a fifth of a step's time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def _wire(rank: int, network: Fabric | None) -> dict[str, int]:
    """Kernel counters by level while no rank sends anything; empty on other ranks than 0, and without a network."""
    dist.barrier()
    counters = network.counters() if network is not None and rank == 0 else {}
    dist.barrier()
    return counters


def _batches(text: Tensor, point: ZeroTrain, step: int, rank: int) -> list[Batch]:
    """Random slices of the text for a step of a rank."""
    (seed,) = np.random.SeedSequence([point.seed, step, rank]).generate_state(1).tolist()
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - point.seq_len, (point.accumulation * point.micro_batch,), generator=draw)
    rows = texts.slices(text, starts.tolist(), point.seq_len + 1)
    return [(part[:, :-1], part[:, 1:]) for part in rows.split(point.micro_batch)]
