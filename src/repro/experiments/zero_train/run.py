"""Train on ranks, which note losses, times, bytes and memory, and turn what they saw into metrics."""

import ctypes
import math
import time
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch._dynamo  # (AdamW imports it on first use: once here, not in 8 ranks at the same time)
import torch.distributed as dist
from torch import Tensor

from repro import quantize
from repro.baselines import systems
from repro.baselines.trainer import Trainer, Training
from repro.emulate.netns import Fabric
from repro.experiments.base import Outcome
from repro.experiments.common import texts
from repro.experiments.common.launched import ranks_of, timed
from repro.experiments.zero_train import EXPERIMENT, WARM_UP, ZeroTrain, ZeroTrainMetrics
from repro.experiments.zero_train.plans import plan_of
from repro.models import wide_linear
from repro.models.gpt import GPT
from repro.scaling.step import layout_of, model_flops
from repro.zero import Plan, ZeroOptimizer, memory, traffic

LAST = 25  # steps that loss_last averages, at most a quarter of all
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


def run(point: ZeroTrain) -> Outcome:
    """Train, and report time, losses, bytes per level and memory. Series: a row per step."""
    plan = plan_of(point)
    systems.prepare(point.plan)
    quantize.warm_up()
    with ranks_of(point, EXPERIMENT.timeout_s) as ranks:
        reports = ranks.run(train, point, plan, ranks.links.fabric)
    table = _series(reports)
    return ranks.outcome(_metrics(point, plan, table, reports, ranks.links.fabric is not None), table)


def _series(reports: list[Report]) -> pd.DataFrame:
    """A row per step: mean loss, the slowest rank's seconds, bytes of all ranks per level (where there is a ledger)."""
    table = sum(report.steps for report in reports)
    table["loss"] /= len(reports)
    table["seconds"] = np.max([report.steps.seconds for report in reports], axis=0)
    return table.rename_axis("step").reset_index()


def _metrics(
    point: ZeroTrain, plan: Plan | None, table: pd.DataFrame, reports: list[Report], shaped: bool
) -> ZeroTrainMetrics:
    counted, parameters = table[WARM_UP:], point.gpt.parameters
    seconds = counted.seconds.median()
    alone = max((report.compute_seconds for report in reports if report.compute_seconds is not None), default=None)
    predicted = {}
    if plan is not None:
        predicted["predicted_state_bytes_per_rank"] = sum(memory.formula(plan, parameters).values())
        if shaped and alone:  # with links of known rates, measured compute and bytes over rates bound the step
            step = traffic.step_seconds(plan, layout_of(point.gpt), point.accumulation, compute_s=alone)
            predicted["predicted_step_seconds"] = step
    return ZeroTrainMetrics(
        step_seconds=seconds,
        compute_seconds=alone,
        tflops_per_rank=model_flops(point.gpt, point.micro_batch * point.accumulation) / seconds / 1e12,
        loss_first=table.loss.iloc[0],
        loss_last=table.loss.iloc[-min(LAST, math.ceil(len(table) / 4)) :].mean(),
        parameters=parameters,
        model_bytes=2 * parameters,
        state_bytes_per_rank=max(report.state_bytes for report in reports),
        **predicted,
        **counted.filter(like="bytes_").mean(),
        **{f"wire_{level}": nbytes for level, nbytes in reports[0].wire.items()},
    )


# --- ranks ---------------------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, point: ZeroTrain, plan: Plan | None, network: Fabric | None = None) -> Report:
    """One rank. With our engine and `dtype` bfloat16: weights and gradients in 16 bits, masters and moments in fp32, as
    in the paper (M = 2 psi)."""
    keep_freed_memory()
    text = texts.whole("shakespeare")
    small = point.gpt.parameters <= LARGE_PARAMETERS
    compute = _compute_seconds(point, _batches(text, point, 0, rank)) if small else None
    trainer = _trainer(point, plan)
    warm_up = torch.optim.lr_scheduler.LinearLR(
        trainer.optimizer, 1 / point.lr_warmup, 1.0, max(1, point.lr_warmup - 1)
    )
    ledger = getattr(trainer.optimizer, "ledger", None)
    arrive = getattr(trainer.optimizer, "synchronize", lambda: None)  # what our engine's last step still sends
    batches = [_batches(text, point, step, rank) for step in range(point.steps)]
    steps, sent, held, before = [], [], dict[str, int](), {}
    for step in range(point.steps):
        if step == WARM_UP:
            arrive()
            before = _wire(rank, network)
        if step in (0, WARM_UP):
            dist.barrier()
            end = time.perf_counter()
        loss = trainer.step(batches[step])
        if step == point.steps - 1:
            arrive()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        # From the end of the step before: what is still under way then costs this one.
        start, end = end, time.perf_counter()
        steps.append({"loss": loss, "seconds": end - start})
        sent.append(ledger.take() if ledger else {})
        held = {kind: max(nbytes, held.get(kind, 0)) for kind, nbytes in trainer.held_bytes().items()}
        warm_up.step()
    after = _wire(rank, network)
    wire = {level: (after[level] - before[level]) / (point.steps - WARM_UP) for level in after}
    table = pd.DataFrame(steps).join(pd.DataFrame(sent).add_prefix("bytes_"))
    return Report(table, sum(held.values()), compute, wire)


def _trainer(point: ZeroTrain, plan: Plan | None) -> Trainer:
    torch.manual_seed(point.seed)  # equal weights on all ranks: no broadcast over the slow network
    large = point.gpt.parameters > LARGE_PARAMETERS
    with torch.device("meta" if large else "cpu"):
        model = _model(point)
    if not large:
        model.to(_device())
    options = {"lr": point.lr, "fused": True}
    training = Training(options, MAX_GRAD_NORM, getattr(torch, point.dtype), model.init_weights)
    if plan is None:
        return systems.SYSTEMS[point.plan](model, point.topology, training)
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
        accumulation=point.accumulation,
        **training.adamw,
    )
    return Trainer(model, optimizer, _device())


def _compute_seconds(point: ZeroTrain, batches: list[Batch]) -> float:
    """Median seconds of a step's forward and backward passes without communication, all ranks at the same time."""
    model = _model(point).to(_device(), getattr(torch, point.dtype))

    def passes() -> None:
        for batch in batches:
            model(*(tensor.to(_device()) for tensor in batch)).backward()

    seconds = []
    for _ in range(5):
        seconds.append(timed(passes)[1])
        model.zero_grad(set_to_none=True)
    return sorted(seconds[2:])[1]


def _model(point: ZeroTrain) -> GPT:
    model = GPT(point.gpt)
    if _device() == "cpu":
        wide_linear.widen(model)
    return model


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def keep_freed_memory() -> None:
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
