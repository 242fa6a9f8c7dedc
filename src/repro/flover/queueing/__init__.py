"""Discrete-event model of serving: when is each request done, and in how many iterations?

Who runs is a policy (`fused`, `fixed`, `batches`, `shared`), how long it takes is told by a `Times` (`times`): by the
paper's formula, or measured on a machine (`repro.flover.measured`). Under `repro.flover.engine` and a model that takes
those times, the same requests end at the same moments.

What the paper's own runs cost is derived in `cost`.

Between two events (an arrival, a finish) the rows of an iteration stay the same; such iterations are summed up.
"""

from repro.flover.queueing.batches import Batches, ConcurrentBatches
from repro.flover.queueing.fixed import FixedSlots
from repro.flover.queueing.fused import Fused
from repro.flover.queueing.result import Policy, QueueRun
from repro.flover.queueing.shared import Instances
from repro.flover.queueing.times import LinearTimes, MeasuredTimes

__all__ = [
    "Batches",
    "ConcurrentBatches",
    "FixedSlots",
    "Fused",
    "Instances",
    "LinearTimes",
    "MeasuredTimes",
    "Policy",
    "QueueRun",
]
