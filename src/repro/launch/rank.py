"""A rank that `launch` started: it joins the group, runs the function, tells its parent, and waits to be ended.

A second thread obeys the parent meanwhile, so a rank answers "where are you" even from inside a collective.
"""

import contextlib
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from repro import files
from repro.emulate.netns import Fabric, enter
from repro.launch.errors import RankError
from repro.launch.where import make_waits_visible, where

parent_ends: set[Connection] = set()  # write ends of control pipes: a forked rank must not keep its siblings alive
_in_rank = False
RESULT, ERROR, WHERE = "result", "error", "where"  # what a rank tells of


def in_rank() -> bool:
    """Whether `launch` started this process."""
    return _in_rank


@dataclass(frozen=True)
class Setup:
    """What a rank has to know before it runs the function."""

    folder: Path
    world_size: int
    timeout_s: float
    threads: int
    fabric: Fabric | None

    def enter(self, rank: int) -> None:
        """Join the namespace and the process group."""
        import torch
        import torch.distributed as dist

        if self.fabric is not None:
            enter(self.fabric.namespace(rank))
            os.environ["GLOO_SOCKET_IFNAME"] = self.fabric.interface
        else:  # gloo's default is the host name's address, which need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world_size)}
        torch.set_num_threads(self.threads)
        store = dist.FileStore(str(self.folder / "store"), self.world_size)
        patience = timedelta(seconds=self.timeout_s + 60)  # the parent's deadline comes first, and knows more
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.world_size, timeout=patience)
        make_waits_visible()


def run_rank(
    rank: int, setup: Setup, fn: Callable[..., Any], args: tuple, control: Connection, told: Connection
) -> None:
    """Main function of a rank's process; it never returns."""
    global _in_rank
    _in_rank = True
    for end in parent_ends:
        end.close()
    parent_ends.clear()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent ends the ranks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    done, released = threading.Event(), threading.Event()

    def leave(kind: str, content: bytes) -> tuple[str, int]:
        """The content in a file; a message of it, so short that it is whole even if ranks tell at once."""
        path = setup.folder / f"{kind}-{rank}"
        try:
            with files.told_of(path):
                path.write_bytes(content)
        except OSError:
            path.unlink(missing_ok=True)  # room for the error
            raise
        return kind, rank

    def obey() -> None:
        """Serve the parent: a message asks where the main thread is; end of file ends the rank."""
        try:
            while control.recv_bytes():
                with contextlib.suppress(OSError):  # a full disk: no answer
                    told.send(leave(WHERE, pickle.dumps(where(run_rank.__code__))))
        except (EOFError, OSError):
            pass
        finally:
            shutil.rmtree(setup.folder, ignore_errors=True)  # a killed parent cannot
            if not done.is_set():
                os._exit(1)
            released.set()

    threading.Thread(target=obey, daemon=True).start()
    try:
        setup.enter(rank)
        report = leave(RESULT, pickle.dumps(fn(rank, setup.world_size, *args)))
    except BaseException as error:
        report = leave(ERROR, _pickled(rank, error))
    done.set()
    told.send(report)
    released.wait()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: a parent without
        stream.flush()
    os._exit(int(report[0] == ERROR))  # at a usual exit, a spawned rank would abort in gloo's threads


def _pickled(rank: int, error: BaseException) -> bytes:
    """The error as a RankError; without the exception object where that cannot be pickled and read back."""
    said = traceback.TracebackException.from_exception(error, compact=True)  # `str(error)` itself may raise
    told = rank, type(error).__name__, str(said), "".join(said.format())
    try:
        content = pickle.dumps(RankError(*told, exception=error))
        pickle.loads(content)  # an exception with an __init__ of its own often fails only here
        return content
    except Exception:
        return pickle.dumps(RankError(*told))
