"""Training with DistributedDataParallel, and the same with a ZeRO plan: what the tests of the engine compare."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from repro.comm import Communicator
from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.zero import Plan, ZeroOptimizer

# 36 and 12 rows over 8 or 16 ranks, 108 over 8, 33 words: FSDP has to pad almost every tensor
SHAPE = GPTConfig(layers=2, hidden=36, heads=3, seq_len=8, vocab=33)
Batch = tuple[torch.Tensor, torch.Tensor]  # tokens, targets
Curve = list[tuple[float, float]]  # (loss, gradient norm) of every step, one rank


def batch(step: int, rank: int, micro_batch: int = 0, seq_len: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that a small model can learn, x -> 3 x + 5 mod 32 from a random start: different for every step,
    micro-batch and rank, and the same in every process. Tokens and targets, int64 [2, seq_len]."""
    draw = torch.Generator().manual_seed(step * 10_000 + rank * 100 + micro_batch)
    tokens = torch.randint(0, 32, (2, 1), generator=draw)
    for _ in range(seq_len):
        tokens = torch.cat((tokens, (3 * tokens[:, -1:] + 5) % 32), dim=1)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Setting:
    """What a training run varies. Step s has `micro_batches[s % len]` backward passes. The default `max_norm` is small
    enough to clip at every step. `change` may alter the model before it is wrapped."""

    steps: int = 12
    shape: GPTConfig = SHAPE
    tied: bool = False
    micro_batches: tuple[int, ...] = (1,)
    max_norm: float | None = 0.4
    optimizer: Any = torch.optim.AdamW
    lr: float = 3e-3
    change: Callable[[nn.Module], None] = lambda model: None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = GPT(replace(self.shape, tied=self.tied))
        self.change(model)
        return model

    def batches(self, rank: int, step: int) -> list[Batch]:
        """Micro-batches of one step."""
        return [batch(step, rank, number) for number in range(self.micro_batches[step % len(self.micro_batches)])]

    def step(self, model: nn.Module, rank: int, step: int) -> float:
        """Forward and backward of one step; its loss."""
        return backward(model, self.batches(rank, step))


def backward(
    model: nn.Module, batches: Sequence[Batch], but_last: Callable[[], AbstractContextManager] = nullcontext
) -> float:
    """Forward and backward of micro-batches, all but the last inside of `but_last`; their mean loss."""
    total = 0.0
    for number, (tokens, targets) in enumerate(batches, 1):
        with but_last() if number < len(batches) else nullcontext():
            loss = model(tokens, targets) / len(batches)
            loss.backward()
        total += loss.item()
    return total


class DDPTrainer:
    """The reference, fp32, as a `repro.baselines.trainer.Trainer`. `norm` is the last step's, before clipping."""

    def __init__(
        self, model: nn.Module, max_norm: float | None, optimizer: Any = torch.optim.AdamW, **options: Any
    ) -> None:
        self.model = nn.parallel.DistributedDataParallel(model)
        self.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.max_norm, self.optimizer = max_norm or float("inf"), optimizer(self.trainable, **options)

    def step(self, batches: Sequence[Batch]) -> float:
        loss = backward(self.model, batches)
        self.norm = nn.utils.clip_grad_norm_(self.trainable, self.max_norm).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def train_ddp(rank: int, world: int, setting: Setting) -> Curve:
    """The reference, fp32."""
    trainer = DDPTrainer(setting.model(), setting.max_norm, setting.optimizer, lr=setting.lr)
    return [(trainer.step(setting.batches(rank, step)), trainer.norm) for step in range(setting.steps)]


def train_plan(rank: int, setting: Setting, plan: Plan, **options: Any) -> Curve:
    """The same with a plan, and all that can overlap overlapping; fp32. `options` may say otherwise."""
    model = setting.model()
    options = {"weight_dtype": torch.float32, "lr": setting.lr, "accumulation": 1} | options
    optimizer = ZeroOptimizer(model, plan, setting.optimizer, max_grad_norm=setting.max_norm, **options)
    found = []
    for step in range(setting.steps):
        loss = backward(model, setting.batches(rank, step), optimizer.no_sync)
        found.append((loss, optimizer.step()))
        optimizer.zero_grad()
    return found


def compare(
    setting: Setting, plans: Sequence[Plan], timeout_s: float = 250.0, **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(loss, norm) of DDP, and of each plan: [ranks, steps, 2]."""
    world_size = plans[0].topology.world_size

    def train(rank: int, world: int) -> list[Curve]:
        groups = cache(Communicator)  # of a topology: they take longer to make than a step
        plan_by_plan = (train_plan(rank, setting, p, communicator=groups(p.topology), **options) for p in plans)
        return [train_ddp(rank, world, setting), *plan_by_plan]

    results = launch(train, world_size, timeout_s=timeout_s)
    reference, *found = (torch.tensor(run) for run in zip(*results, strict=True))
    return reference, found
