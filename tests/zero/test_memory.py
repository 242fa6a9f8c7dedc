"""Predicted bytes per rank: the papers' formulas, and what the engine really holds."""

import math
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_reference import batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from repro.comm import Communicator, Stream
from repro.comm.exchange import Round
from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.topology import frontier
from repro.zero import ZeroOptimizer, memory
from repro.zero import plan as plans
from repro.zero.chunks import splits
from repro.zero.layout import BucketLayout, Layout, layout

SHAPE = GPTConfig(layers=2, hidden=36, heads=3, seq_len=8, vocab=33)  # 8 divides nearly no tensor
TOPOLOGY = frontier(2, 2, 2)
PLANS = [
    *(plans.named(name, TOPOLOGY) for name in plans.NAMED),
    plans.hierarchical(TOPOLOGY, reduce_across="micro_batch"),
    plans.hierarchical(TOPOLOGY, weights="node", secondary="package"),
    plans.hierarchical(TOPOLOGY, "package", "package", "node"),
]


def _model() -> GPT:
    model = GPT(SHAPE)
    model.blocks[0].up.requires_grad_(False)
    return model


@pytest.mark.parametrize("nodes", [1, 8, 48])
def test_formulas_of_the_papers_for_20_billion_parameters(nodes):
    psi, ranks = 20_000_000_000, 8 * nodes
    total = {name: sum(memory.formula(plans.named(name, frontier(nodes)), psi).values()) for name in plans.NAMED}
    assert total["ddp"] == 16 * psi
    assert total["zero3"] == pytest.approx(16 * psi / ranks)
    assert total["zeropp"] == pytest.approx(16 * psi / ranks + (2 * psi / 8 if nodes > 1 else 0))
    assert total["hierarchical"] == pytest.approx(1.25 * psi + 12 * psi / ranks)
    assert total["hfsdp"] == pytest.approx(4 * psi / 8 + 12 * psi / ranks)  # as Megatron-FSDP's strategy "optim"
    assert total["hsdp"] == pytest.approx(16 * psi / 8)


# GPT-NeoX-20B's sizes
TWENTY_BILLION = GPTConfig(layers=44, hidden=6144, heads=64, seq_len=2048, vocab=50432)


def _dry_run(rank: int, world: int, name: str) -> tuple[dict[str, int], dict[str, int]]:
    """One step of one of 384 ranks, with tensors that have shapes and no memory; (held, predicted)."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=203, world_size=384)
    plan = plans.named(name, frontier(48))
    with torch.device("meta"):
        model = GPT(TWENTY_BILLION)
    predicted = memory.predict(plan, layout(model))
    communicator = Communicator(plan.topology)
    for route in vars(plan.moves).values():  # groups cannot be made among fake tensors
        communicator.hops(route)
    for level in (plan.weights, plan.optimizer):
        communicator.mesh(plan.levels(None, level))
    with FakeTensorMode():
        optimizer = ZeroOptimizer(
            model,
            plan,
            communicator=communicator,
            init=lambda module: None,
            broadcast=False,
            gradient_dtype=torch.bfloat16,
            fused=True,
        )
        tokens = torch.zeros(1, 64, dtype=torch.int64)
        model(tokens, tokens).backward()
        held = optimizer.held_bytes()
        torch.Tensor.item = lambda tensor: 1.0  # the norm has no value
        optimizer.step()
        return held | {"optimizer": optimizer.held_bytes()["optimizer"]}, predicted


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("hierarchical", 26.35),  # 1.25 psi + 12 psi / 384, psi = 20.57e9
        ("zeropp", 6.0),
        ("zero3", 0.857),
    ],
)
def test_twenty_billion_parameters_on_384_ranks(name, gigabytes):
    held, predicted = launch(_dry_run, 1, name, timeout_s=200)[0]
    predicted["optimizer"] += 45 * 4  # Adam's step counter of each bucket
    assert held == predicted
    assert sum(held.values()) == pytest.approx(gigabytes * 1e9, rel=2e-3)
    formula = memory.formula(plans.named(name, frontier(48)), TWENTY_BILLION.parameters)
    assert sum(held.values()) == pytest.approx(sum(formula.values()), rel=2e-3)  # hardly any padding


def _held(rank: int, world: int) -> list[dict[str, int]]:
    found, groups = [], Communicator(TOPOLOGY)
    for plan in PLANS:
        model = _model()
        options = {"gradient_dtype": torch.bfloat16, "broadcast": False, "lr": 1e-3}
        optimizer = ZeroOptimizer(model, plan, communicator=groups, **options)
        for step in range(2):
            model(*batch(step, rank)).backward()
            held = optimizer.held_bytes()
            optimizer.step()
        assert optimizer.held_bytes()["gradients"] == optimizer.held_bytes()["secondary"] == 0
        found.append(held)
    return found


def test_working_memory_by_hand():
    """Root of 10 values and two blocks of 8 gathered, in 16 bits; gradients of the root in 16 bits, and summed in fp32."""
    block, root = BucketLayout(((8,),)), BucketLayout(((10,),))
    plan = plans.zero3(frontier(1, 1, 2))
    assert memory.working(plan, Layout((block, block, root))) == 2 * (10 + 8 + 8) + (2 + 4) * 10


@pytest.mark.parametrize(("checkpointing", "nbytes"), [(False, 34 * 2 * 12 * 8), (True, (2 * 2 + 34) * 12 * 8)])
def test_activations_by_hand(checkpointing, nbytes):
    """12 tokens, hidden 8, two layers; logits of 16 words in fp32, their gradient, and both in 16 bits: 12 bytes."""
    found = memory.activations(2, 8, seq_len=4, micro_batch=3, vocab=16, checkpointing=checkpointing)
    assert found == nbytes + 12 * 12 * 16


@pytest.mark.slow
def test_the_engine_holds_what_was_predicted():
    """Exact, apart from Adam's step counter: 4 bytes for each of 3 buckets."""
    for held in launch(_held, 8, timeout_s=100):
        for plan, found in zip(PLANS, held, strict=True):
            expected = memory.predict(plan, layout(_model()))
            expected["optimizer"] += 3 * 4
            assert found == expected, plan.name


class _Meter:
    """The most bytes that were in use at once."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.now += nbytes
            self.most = max(self.most, self.now)


def _metered(meter: _Meter, steps: Callable[..., Generator], nbytes: Callable[..., int], at_once: bool) -> Callable:
    """`steps` counts `nbytes` from its call on, or from its start in a thread, to its end."""

    def metered(*args: Any) -> Generator:
        def counted() -> Generator:
            if not at_once:
                meter.add(nbytes(*args))
            result = yield from steps(*args)
            meter.add(-nbytes(*args))
            return result

        if at_once:
            meter.add(nbytes(*args))
        return counted()

    return metered


DEEP = GPTConfig(layers=4, hidden=12, heads=2, seq_len=8, vocab=33)


def _most_under_way(rank: int, world: int, chosen: list[plans.Plan]) -> list[dict[str, int]]:
    """No gradient arrives before the backward has to wait for room: then as much as may be is under way."""
    arrive, full = Round.arrive, threading.Event()
    Round.arrive = lambda messages: (messages.label % 4 != 1 or full.wait(), arrive(messages))
    found, groups = [], Communicator(chosen[0].topology)
    for plan in chosen:
        full.clear()
        model, gradients, weights = GPT(DEEP), _Meter(), _Meter()
        optimizer = ZeroOptimizer(model, plan, communicator=groups, accumulation=1, broadcast=False, lr=1e-3)
        optimizer._reducing = _metered(gradients, optimizer._reducing, lambda _, gradient, *__: gradient.nbytes, True)
        size = optimizer.weight_dtype.itemsize * math.prod(splits(plan))
        optimizer._publishing = _metered(
            weights, optimizer._publishing, lambda _, master, size=size: size * master.numel(), False
        )
        optimizer.reductions.make_room = _noting(optimizer.reductions, full)
        for step in range(2):
            model(*batch(step, rank)).backward()
            optimizer.held_bytes()  # waits for what is under way
            sums = sum(bucket.total.nbytes for bucket in optimizer.buckets if bucket.total is not None)
            optimizer.step()
        optimizer.synchronize()
        found.append({"gradients": gradients.most, "sums": sums, "weights": weights.most})
    return found


def _noting(stream: Stream, full: threading.Event) -> Callable[[], None]:
    make_room = stream.make_room

    def noted() -> None:
        if len(stream._under_way) == stream.most:
            full.set()
        make_room()

    return noted


def test_no_more_is_under_way_than_was_predicted():
    """To the byte, for the plans whose sums travel. Publications may be faster than the next is started."""
    chosen = [plans.hierarchical(frontier(2, 1, 2), gradients="package"), plans.hfsdp(frontier(2, 1, 2))]
    for found in launch(_most_under_way, 4, chosen, timeout_s=100):
        for plan, most in zip(chosen, found, strict=True):
            predicted = memory.under_way(plan, layout(GPT(DEEP)))
            assert 0 < most.pop("weights") <= predicted.pop("weights"), plan.name
            assert most == predicted, plan.name
