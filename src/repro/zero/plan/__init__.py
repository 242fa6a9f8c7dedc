"""Plans: their space (`space.py`) and those with a name (`catalogue.py`). `repro.zero.search` finds the best."""

from repro.zero.plan.catalogue import (
    BLOCK,
    NAMED,
    ddp,
    hierarchical,
    hierarchical_fp,
    hpz,
    hsdp,
    mics,
    named,
    qgz,
    qwz,
    zero1,
    zero2,
    zero3,
    zeropp,
)
from repro.zero.plan.space import Plan, blockwise, unquantised

__all__ = [
    "BLOCK",
    "NAMED",
    "Plan",
    "blockwise",
    "ddp",
    "hierarchical",
    "hierarchical_fp",
    "hpz",
    "hsdp",
    "mics",
    "named",
    "qgz",
    "qwz",
    "unquantised",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
]
