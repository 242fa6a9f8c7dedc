"""How long a search may go on: seconds, or until Ctrl-C."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator


class Clock:
    """Seconds that are left of the command: `seconds` at first, none once Ctrl-C was pressed."""

    def __init__(self, seconds: float) -> None:
        self.end, self.interrupted = time.perf_counter() + seconds, False

    def __call__(self) -> float:
        return 0.0 if self.interrupted else self.end - time.perf_counter()

    def share(self, share: float) -> float:
        """So much of what is left, and never nothing: a search finds something in a moment, too."""
        return max(share * self(), 1e-3)

    def within(self, seconds: float) -> Callable[[], float]:
        """The seconds that are left of these `seconds` from now on, and of the command."""
        end = time.perf_counter() + seconds
        return lambda: min(self(), end - time.perf_counter())

    @contextlib.contextmanager
    def stopped_by_interrupts(self) -> Iterator[None]:
        """The first Ctrl-C makes this clock say 0; the second ends the process at once, whatever it is in."""

        def stop(number: int, frame: object) -> None:
            self.interrupted = True
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            with contextlib.suppress(OSError):  # whoever read it may be gone
                os.write(2, b"\nstopping with the best placement so far; Ctrl-C again ends at once\n")

        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:  # as of a job in the background
            signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
