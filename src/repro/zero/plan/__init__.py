"""Plans: the space of them (`space.py`), those with a name (`catalogue.py`), and the best one for a machine (`best.py`)."""

from repro.zero.plan.best import Candidate, Machine, partitions, search
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
    "Candidate",
    "Machine",
    "Plan",
    "blockwise",
    "ddp",
    "hierarchical",
    "hierarchical_fp",
    "hpz",
    "hsdp",
    "mics",
    "named",
    "partitions",
    "qgz",
    "qwz",
    "search",
    "unquantised",
    "zero1",
    "zero2",
    "zero3",
    "zeropp",
]
