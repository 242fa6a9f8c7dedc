"""Names that engines know, spelled out so that a point is checked without importing an engine."""

from typing import Literal, get_args

# Of `repro.zero.plan.named`.
NamedPlan = Literal[
    *("ddp", "zero1", "zero2", "zero3", "hpz", "qwz", "qgz", "zeropp", "mics", "hsdp"),
    *("hfsdp", "hierarchical", "hierarchical_fp"),
]
NAMED: tuple[str, ...] = get_args(NamedPlan)
# Of `repro.scaling.CATALOGUE`.
Hardware = Literal["frontier", "frontier-rccl", "wilkes3", "dgx-h100", "gb200-nvl72", "tpu-like-torus", "dgx-2"]
# Of `repro.flover.buffers.LAYOUTS`: what moves when a request leaves; window is the paper's reordering, fixed moves none.
Layout = Literal["window", "fixed", "shift", "last", "paged"]
