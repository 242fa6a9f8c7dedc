"""ZeRO with each state partitioned over its own level of the machine (arXiv 2501.04266).

    from repro.topology import frontier
    from repro.zero import ZeroEngine, plan

    engine = ZeroEngine(model, plan.hierarchical(frontier(nodes=2)), torch.optim.AdamW, lr=3e-4)
    loss = engine(tokens, targets)
    loss.backward()
    engine.step()

Read `plan.py` (what a plan is), then `engine.py` (the three levels at work), then `comm.py` one room up.
"""

from repro.zero.engine import ZeroEngine
from repro.zero.plan import Plan

__all__ = ["Plan", "ZeroEngine"]
