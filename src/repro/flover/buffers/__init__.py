"""Where the keys and values of running requests lie, and what moves when one leaves: `contiguous.py` has the
paper's answer and its rivals, `paged.py` another, under one interface (`base.py`)."""

from repro.flover.buffers.base import Buffers
from repro.flover.buffers.contiguous import FixedBuffers, LastBuffers, ShiftBuffers, WindowBuffers
from repro.flover.buffers.paged import PagedBuffers

LAYOUTS: dict[str, type[Buffers]] = {
    "window": WindowBuffers,
    "fixed": FixedBuffers,
    "shift": ShiftBuffers,
    "last": LastBuffers,
    "paged": PagedBuffers,
}

__all__ = ["LAYOUTS", "Buffers", "WindowBuffers"]
