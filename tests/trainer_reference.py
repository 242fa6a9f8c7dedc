"""The training that tests of the baselines compare with DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

import torch
from ddp_reference import DDPTrainer, batch

from repro.baselines.trainer import Training
from repro.models.gpt import GPT, GPTConfig
from repro.topology import frontier
from repro.zero.buckets import blocks
from repro.zero.materialise import materialise

TOPOLOGY = frontier(2, 1, 2)
WORLD, RANKS_PER_NODE = 4, 2
STEPS = 10
TRAINING = Training({"lr": 3e-3}, max_grad_norm=0.4, dtype=torch.float32)
BF16 = Training({"lr": 3e-3}, max_grad_norm=0.4)


def model(shape: GPTConfig) -> GPT:
    """The same on every rank."""
    torch.manual_seed(0)
    return GPT(shape)


def on_meta(shape: GPTConfig) -> GPT:
    """Without memory; the seed is set for what fills it."""
    torch.manual_seed(0)
    with torch.device("meta"):
        return GPT(shape)


def made_real(shape: GPTConfig) -> GPT:
    """What `on_meta` becomes when its blocks are filled one after the other."""
    found = on_meta(shape)
    for module in (*blocks(found), found):
        materialise(module, "cpu", found.init_weights)
    return found


def ddp(shape: GPTConfig) -> DDPTrainer:
    """The reference."""
    return DDPTrainer(model(shape), TRAINING.max_grad_norm, **TRAINING.adamw)


def losses(trainer: Any, rank: int, micro_batches: int = 1, steps: int = STEPS) -> list[float]:
    """With a warm-up of the learning rate through the trainer's optimizer."""
    schedule = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 0.2, 1.0, STEPS // 2)
    found = []
    for step in range(steps):
        found.append(trainer.step([batch(step, rank, number) for number in range(micro_batches)]))
        assert not isinstance(trainer, DDPTrainer) or trainer.norm > trainer.max_norm, "the test must clip"
        schedule.step()
    return found


def train(rank: int, world: int, build: Callable[[], Any]) -> list[list[float]]:
    """Losses with one and with two micro-batches, of a trainer each."""
    return [losses(build(), rank, micro_batches) for micro_batches in (1, 2)]
