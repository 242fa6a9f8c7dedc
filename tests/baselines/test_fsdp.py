"""FSDP2, HSDP and FSDP2 with resharding to the node train as DistributedDataParallel does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # AdamW imports it on first use: once here, not in every rank
from ddp_reference import batch
from torch import nn
from trainer_reference import (
    BF16,
    RANKS_PER_NODE,
    STEPS,
    TOPOLOGY,
    TRAINING,
    WORLD,
    ddp,
    losses,
    made_real,
    model,
    on_meta,
    train,
)

from repro.baselines import fsdp
from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.topology import Level, Topology, frontier

SHAPE = GPTConfig(layers=2, hidden=36, heads=3, seq_len=8, vocab=33)  # 33 words: one tensor needs padding
BASELINES = {"FSDP2": fsdp.fsdp2, "HSDP": fsdp.hsdp, "FSDP2-reshard": fsdp.fsdp2_reshard}


def _baseline(name: str) -> Callable[[], Any]:
    return lambda: BASELINES[name](model(SHAPE), TOPOLOGY, TRAINING)


@pytest.fixture(scope="module")
def reference() -> list:
    return launch(train, WORLD, lambda: ddp(SHAPE), timeout_s=100)


@pytest.mark.parametrize("name", BASELINES)
def test_losses_are_those_of_ddp_with_and_without_accumulation(name, reference):
    found = launch(train, WORLD, _baseline(name), timeout_s=100)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(reference), rtol=2e-5, atol=0)
    first, last = torch.tensor(reference)[..., 0].mean(), torch.tensor(reference)[..., -1].mean()
    assert last < first - 0.3, "the test must learn"


def _half_precision(rank: int, world: int) -> dict[str, Any]:
    found = {}
    for name, build in BASELINES.items():
        trainer = build(model(SHAPE), TOPOLOGY, BF16)
        weight = trainer.model.blocks[0].up.weight
        seen: list[torch.dtype] = []
        trainer.model.blocks[0].up.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        curve = [trainer.step([batch(step, rank)]) for step in range(STEPS)]
        trainer.model(*batch(STEPS, rank))
        between = trainer.model.blocks[0].up.weight.to_local().numel() / weight.numel()
        found[name] = weight.dtype, seen[-1], trainer.held_bytes(), curve, between
    return found


def test_bf16_computes_in_16_bits_over_fp32_masters():
    """12 bytes of masters and moments and 4 of gradients per parameter, over all ranks or those of a node. Between
    forward and backward, a block is spread over the ranks that the backward gathers it from."""
    results = launch(_half_precision, WORLD, timeout_s=100)[0]
    for name, (stored, computed, held, curve, between) in results.items():
        assert (stored, computed) == (torch.float32, torch.bfloat16)
        share = SHAPE.parameters / (RANKS_PER_NODE if name == "HSDP" else WORLD)
        expected = {"weights": 4 * share, "gradients": 4 * share, "optimizer": 8 * share}
        assert held == pytest.approx(expected, rel=0.02), name  # padding, step counters
        assert between == 1 / (WORLD if name == "FSDP2" else RANKS_PER_NODE)
        assert curve[-1] < curve[0] - 0.3


def _from_meta(rank: int, world: int) -> list[list[float]]:
    curves = []
    for make in (on_meta, made_real):
        gpt = make(SHAPE)
        curves.append(losses(fsdp.fsdp2(gpt, TOPOLOGY, replace(TRAINING, init=gpt.init_weights)), rank))
    return curves


@pytest.mark.exhaustive
def test_a_model_on_the_meta_device_is_made_real_block_by_block():
    for found, expected in launch(_from_meta, WORLD, timeout_s=100):
        assert found == expected


def _misuse(rank: int, world: int) -> list[str]:
    def different() -> nn.Module:
        torch.manual_seed(rank)
        return GPT(SHAPE)

    flat, messages = Topology((Level("all", WORLD),)), []
    for action in (
        lambda: fsdp.fsdp2(different(), TOPOLOGY, BF16),
        lambda: fsdp.fsdp2(model(SHAPE).bfloat16(), TOPOLOGY, BF16),
        lambda: fsdp.fsdp2(model(SHAPE), TOPOLOGY, replace(BF16, dtype=torch.float16)),
        lambda: fsdp.fsdp2(model(SHAPE), frontier(2, 2, 2), BF16),
        lambda: fsdp.hsdp(model(SHAPE), flat, BF16),
        lambda: fsdp.fsdp2_reshard(model(SHAPE), frontier(1, 2, 2), BF16),
        lambda: fsdp.fsdp2(model(SHAPE), TOPOLOGY, BF16).step([]),
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
