"""Where the keys and values of running requests lie, and what moves when one leaves: `window.py` is the paper's answer,
the others stand beside it under the same interface (`base.py`)."""

from repro.flover.buffers.base import Buffers
from repro.flover.buffers.baseline_layouts import FixedBuffers, LastBuffers, ShiftBuffers
from repro.flover.buffers.paged import PagedBuffers
from repro.flover.buffers.window import WindowBuffers

LAYOUTS: dict[str, type[Buffers]] = {
    "window": WindowBuffers,
    "fixed": FixedBuffers,
    "shift": ShiftBuffers,
    "last": LastBuffers,
    "paged": PagedBuffers,
}

__all__ = ["LAYOUTS", "Buffers", "WindowBuffers"]
