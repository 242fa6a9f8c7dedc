"""How a process that runs an allocation is asked to end."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Ended(BaseException):
    """Somebody asked this process to end: scancel, preemption, a time limit, Snakemake."""


@contextlib.contextmanager
def politely() -> Iterator[None]:
    """Turn SIGTERM into `Ended`."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
