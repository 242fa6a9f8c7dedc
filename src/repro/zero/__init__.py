"""ZeRO with each state partitioned over its own level of the machine (arXiv 2501.04266).

    from repro import zero
    from repro.topology import frontier

    optimizer = zero.ZeroOptimizer(model, zero.plan.hierarchical(frontier(nodes=2)), torch.optim.AdamW, lr=3e-4)
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

Read `plan.py` (the plans that have names), then `engine.py` (the three levels at work), then the package `repro.comm`.
"""

from repro.zero import checkpoint, plan
from repro.zero.engine import BrokenEngineError, ZeroOptimizer
from repro.zero.loss_scale import LossScale
from repro.zero.plan import Plan
from repro.zero.plan_search import search

__all__ = ["BrokenEngineError", "LossScale", "Plan", "ZeroOptimizer", "checkpoint", "plan", "search"]
