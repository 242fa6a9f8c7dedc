"""Predicted bytes per rank: the papers' formulas, and what the engine really holds."""

import pytest
import torch

from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.topology import frontier
from repro.zero import ZeroOptimizer, memory
from repro.zero import plan as plans
from repro.zero.layout import layout

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


def _held(rank: int, world: int, batches) -> list[dict[str, int]]:
    found = []
    for plan in PLANS:
        model = _model()
        optimizer = ZeroOptimizer(model, plan, gradient_dtype=torch.bfloat16, broadcast=False, lr=1e-3)
        for step in range(2):
            model(*batches(step, rank)).backward()
            held = optimizer.held_bytes()
            optimizer.step()
        assert optimizer.held_bytes()["gradients"] == optimizer.held_bytes()["secondary"] == 0
        found.append(held)
    return found


def test_the_engine_holds_what_was_predicted(batches):
    """Exact, apart from Adam's step counter: 4 bytes for each of 3 buckets."""
    for held in launch(_held, 8, batches, timeout_s=100):
        for plan, found in zip(PLANS, held, strict=True):
            expected = memory.predict(plan, layout(_model()))
            expected["optimizer"] += 3 * 4
            assert found == expected, plan.name
