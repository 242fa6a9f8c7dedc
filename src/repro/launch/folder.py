"""The folder of a launch, in which ranks leave what they tell their parent."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "repro-launch-"
_YOUNG_S = 60.0  # a folder that is younger may not have been locked yet


@contextlib.contextmanager
def private() -> Iterator[Path]:
    """A folder of this user alone, locked while the block runs. Those of launches that were killed with all their ranks
    are removed first. FileNotFoundError where there is no folder for temporary files."""
    _clear()
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as held,
    ):
        with contextlib.suppress(OSError):  # as on NFS, which locks no folder; `_clear` then removes none
            held.enter_context(_locked(Path(name)))
        yield Path(name)


def _clear() -> None:
    """Remove old folders of this user that nobody locks: a parent that is killed cannot, and its ranks may die too."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another launch was faster, or its owner lives
            found = path.lstat()
            old = time.time() - found.st_mtime > _YOUNG_S
            if old and stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid():
                with _locked(path):
                    shutil.rmtree(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """BlockingIOError where another process holds it. Forked ranks hold it too, until they end."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
