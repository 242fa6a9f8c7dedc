"""FSDP2, HSDP and FSDP2 with resharding to the node train as DistributedDataParallel does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # AdamW imports it on first use: once here, not in every rank
from torch import nn

from repro.baselines import fsdp
from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.topology import Level, Topology, frontier

TOPOLOGY = frontier(2, 1, 2)
WORLD, RANKS_PER_NODE = 4, 2
SHAPE = GPTConfig(layers=2, hidden=36, heads=3, seq_len=8, vocab=33)  # 33 words: one tensor needs padding
STEPS, CLIP, OPTIONS = 10, 0.4, {"lr": 3e-3}
BASELINES = {"FSDP2": fsdp.fsdp2, "HSDP": fsdp.hsdp, "FSDP2-reshard": fsdp.fsdp2_reshard}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(SHAPE)


def _batch(step: int, rank: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences x -> 3 x + 5 mod 32 from a random start."""
    draw = torch.Generator().manual_seed(step * 10_000 + rank * 100 + micro_batch)
    tokens = torch.randint(0, 32, (2, 1), generator=draw)
    for _ in range(SHAPE.seq_len):
        tokens = torch.cat((tokens, (3 * tokens[:, -1:] + 5) % 32), dim=1)
    return tokens[:, :-1], tokens[:, 1:]


class _DDP:
    """The reference, with the interface of a trainer."""

    def __init__(self) -> None:
        self.model = nn.parallel.DistributedDataParallel(_model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **OPTIONS)

    def step(self, batches: list) -> float:
        total = 0.0
        for batch in batches:
            loss = self.model(*batch) / len(batches)
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        assert norm > CLIP, "the test must clip"
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def _losses(trainer: Any, rank: int, micro_batches: int) -> list[float]:
    """With a warm-up of the learning rate through the trainer's optimizer."""
    schedule = torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 0.2, 1.0, STEPS // 2)
    found = []
    for step in range(STEPS):
        found.append(trainer.step([_batch(step, rank, number) for number in range(micro_batches)]))
        schedule.step()
    return found


def _train(rank: int, world: int, build: Callable[[], Any]) -> list[list[float]]:
    return [_losses(build(), rank, micro_batches) for micro_batches in (1, 2)]


def _baseline(name: str) -> Callable[[], Any]:
    return lambda: BASELINES[name](_model(), TOPOLOGY, OPTIONS, CLIP, torch.float32)


@pytest.fixture(scope="module")
def reference() -> list:
    return launch(_train, WORLD, _DDP, timeout_s=100)


@pytest.mark.parametrize("name", BASELINES)
def test_losses_are_those_of_ddp_with_and_without_accumulation(name, reference):
    found = launch(_train, WORLD, _baseline(name), timeout_s=100)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(reference), rtol=2e-5, atol=0)
    first, last = torch.tensor(reference)[..., 0].mean(), torch.tensor(reference)[..., -1].mean()
    assert last < first - 0.3, "the test must learn"


def _half_precision(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, build in BASELINES.items():
        trainer = build(_model(), TOPOLOGY, OPTIONS, CLIP)
        weight = trainer.model.blocks[0].up.weight
        seen: list[torch.dtype] = []
        trainer.model.blocks[0].up.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        losses = [trainer.step([_batch(step, rank, 0)]) for step in range(STEPS)]
        trainer.model(*_batch(STEPS, rank, 0))
        between = trainer.model.blocks[0].up.weight.to_local().numel() / weight.numel()
        found[name] = weight.dtype, seen[-1], trainer.held_bytes(), losses, between
    return found


def test_bf16_computes_in_16_bits_over_fp32_masters():
    """12 bytes of masters and moments and 4 of gradients per parameter, over all ranks or those of a node. Between forward and
    backward, a block is spread over the ranks that the backward gathers it from."""
    results = launch(_half_precision, WORLD, timeout_s=100)[0]
    for name, (stored, computed, held, losses, between) in results.items():
        assert (stored, computed) == (torch.float32, torch.bfloat16)
        share = SHAPE.parameters / (RANKS_PER_NODE if name == "HSDP" else WORLD)
        expected = {"weights": 4 * share, "gradients": 4 * share, "optimizer": 8 * share}
        assert held == pytest.approx(expected, rel=0.02), name  # padding, step counters
        assert between == 1 / (WORLD if name == "FSDP2" else RANKS_PER_NODE)
        assert losses[-1] < losses[0] - 0.3


def _misuse(rank: int, world: int) -> list[str]:
    def different() -> nn.Module:
        torch.manual_seed(rank)
        return GPT(SHAPE)

    flat, messages = Topology((Level("all", WORLD),)), []
    for action in (
        lambda: fsdp.fsdp2(different(), TOPOLOGY, OPTIONS),
        lambda: fsdp.fsdp2(_model().bfloat16(), TOPOLOGY, OPTIONS),
        lambda: fsdp.fsdp2(_model(), TOPOLOGY, OPTIONS, dtype=torch.float16),
        lambda: fsdp.fsdp2(_model(), frontier(2, 2, 2), OPTIONS),
        lambda: fsdp.hsdp(_model(), flat, OPTIONS),
        lambda: fsdp.fsdp2_reshard(_model(), frontier(1, 2, 2), OPTIONS),
        lambda: fsdp.fsdp2(_model(), TOPOLOGY, OPTIONS).step([]),
    ):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_what_it_refuses():
    expected = [
        "3 ranks have other weights than rank 0",
        "parameter tokens.weight is torch.bfloat16",
        "dtype is torch.float16",
        "topology has 8 ranks, the process group 4",
        "the topology has 4 x 1",
        "the topology has 1 x 4",
        "at least one micro-batch",
    ]
    for found, wanted in zip(launch(_misuse, WORLD, timeout_s=100)[0], expected, strict=True):
        assert wanted in found
