"""Discrete-event model of serving: when is each request done, and in how many iterations?

Who runs is a policy (`fused`: the paper's, and serial with one slot; `batches`: static and with windows; `shared`:
batches or instances that slow each other down), how long it takes is told by a `Times` (`times`): the paper's t1 (1 + c
(b - 1)), or one measured on a machine (`repro.flover.measured`). Under `repro.flover.engine` and a model that takes
those times, the same requests end at the same moments.

Between two events (an arrival, a finish) the rows of an iteration stay the same; such iterations are summed up.
"""

from repro.flover.queueing.batches import Batches, ConcurrentBatches
from repro.flover.queueing.fused import Fused
from repro.flover.queueing.result import Policy, QueueRun
from repro.flover.queueing.shared import Instances, evenly
from repro.flover.queueing.times import LinearTimes, MeasuredTimes, Times

__all__ = [
    "Batches",
    "ConcurrentBatches",
    "Fused",
    "Instances",
    "LinearTimes",
    "MeasuredTimes",
    "Policy",
    "QueueRun",
    "Times",
    "evenly",
]
