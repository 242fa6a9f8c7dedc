"""Files that appear whole or not at all: written aside, synced, then renamed; and ordinary files, read whole."""

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_MOST = 64 << 20  # bytes; nothing that is read whole here is a tenth of it
_NAME = 200  # bytes of a file's name in that of its temporary file: a name may have 255
_TRIED = bytes(4096)


def read(path: Path, most: int = _MOST) -> bytes:
    """Contents of an ordinary file, or of one behind a link. OSError for anything else (a pipe would wait, a device may
    never end) and for more than `most` bytes."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        found = os.fstat(file.fileno())
        _check_ordinary(path, found)
        contents = file.read(most + 1) if found.st_size <= most else b""
    if max(found.st_size, len(contents)) > most:
        raise OSError(f"{path}: has more than {most >> 20} MiB, which is the most allowed")
    return contents


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. When the block succeeds it is synced and renamed over `path`, else removed.

    A link is followed. What killed processes left of earlier writes of this file is removed where the file system has
    locks. OSError for a path that is there and no ordinary file.
    """
    path = _replaced(path)
    with _aside(path) as temporary:
        with told_of(path):
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        temporary.replace(path)


@contextlib.contextmanager
def told_of(path: Path) -> Iterator[None]:
    """That the disk is full, or a quota, is told with `path`: an error in a write to an open file says none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error.filename = str(path)
        raise


def try_writing(path: Path) -> None:
    """Called before the work whose result goes to `path`: OSError says why it cannot be written."""
    try:
        with _aside(_replaced(path)) as temporary, temporary.open("wb") as file:
            file.write(_TRIED)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError) as error:  # ValueError: a character that no name may have
        reason = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise OSError(f"{path}: cannot be written: {reason}") from error


def _replaced(path: Path) -> Path:
    """What a write to `path` replaces: the file behind a link. OSError where that is no ordinary file."""
    real = Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        _check_ordinary(path, real.stat())
    return real


def _check_ordinary(path: Path, found: os.stat_result) -> None:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    if not stat.S_ISREG(found.st_mode):
        kind = kinds.get(stat.S_IFMT(found.st_mode), "a device")
        raise OSError(f"{path}: is {kind}; allowed: an ordinary file")


@contextlib.contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A new, empty file beside `path`, which is gone afterwards. A lock says that its process lives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    start = "." + os.fsdecode(os.fsencode(path.name)[:_NAME]) + "."
    _clear(path.parent, start)
    while True:
        temporary = path.with_name(f"{start}{secrets.token_hex(4)}.tmp")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if _locked(handle) is not False and temporary.exists():  # else another took it for a dead one's
            break
        os.close(handle)
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def _clear(folder: Path, start: str) -> None:
    """Remove temporary files whose process is gone."""
    for left in folder.glob(f"{glob.escape(start)}{8 * '?'}.tmp"):
        with contextlib.suppress(OSError):
            handle = os.open(left, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(handle).st_mode) and _locked(handle):
                    left.unlink()
            finally:
                os.close(handle)


def _locked(handle: int) -> bool | None:
    """Whether this process now has the lock of a file; None where the file system knows no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
