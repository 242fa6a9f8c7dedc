"""A rank that is killed, and others that have the time to tell what they saw of it."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path


def die(folder: Path, others: int) -> None:
    """Kill this process: its connections break at once. Its parent, who ends all ranks then, learns of it when so many
    others have told something in `folder`, or after 20 s: a child holds the pipe open by which it sees that this lives."""
    if os.fork() == 0:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    os.close(descriptor)
        limit = time.monotonic() + 20
        while len(list(folder.glob("rank-*"))) < others and time.monotonic() < limit:
            time.sleep(0.02)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def tell(folder: Path, rank: int, what: str) -> None:
    """Then wait for the end: the rank that was killed is the cause."""
    (folder / f".rank-{rank}").write_text(what)
    (folder / f".rank-{rank}").rename(folder / f"rank-{rank}")
    time.sleep(30)


def told(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("rank-*"))]
