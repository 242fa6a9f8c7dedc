"""Whose a network is. A name tells nothing: anybody may call a namespace `repro-1-mine`.

Who builds a network first writes a record of its namespaces, in a folder of root's alone, and holds a lock on it for as
long as it lives. A record that nobody locks is of a dead owner. What no record lists is never removed.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

RECORDS = Path("/run/repro-fabrics")
# Open records of this process, by name; not in the fabrics, which travel to spawned ranks. A forked rank has a copy: the
# lock lives until the last of them has left the network.
_held: dict[str, IO[str]] = {}


def claim(name: str, namespaces: Sequence[str]) -> None:
    """Own `namespaces`, which are yet to be made, under the record `name`. OSError where the record cannot be kept."""
    with _records() as folder:
        file = (folder / name).open("x")
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("\n".join(namespaces))
        file.flush()
    _held[name] = file


def release(name: str) -> None:
    """Drop the record: its namespaces are gone."""
    if file := _held.pop(name, None):
        (RECORDS / name).unlink(missing_ok=True)
        file.close()


def mine() -> Iterator[list[str]]:
    """The namespaces of each network that this process owns. Its record goes once the caller, who removes them, asks for
    the next."""
    for name in list(_held):
        yield (RECORDS / name).read_text().split()
        release(name)


def abandoned() -> Iterator[list[str]]:
    """The namespaces of each dead owner. Its record goes once the caller, who removes them, asks for the next."""
    with _records() as folder:
        for path in sorted(folder.iterdir()):
            with contextlib.ExitStack() as held:
                try:
                    file = held.enter_context(path.open())
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (FileNotFoundError, BlockingIOError):  # its owner lives, or has just released it
                    continue
                yield file.read().split()
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _records() -> Iterator[Path]:
    """The folder, locked, so that nobody takes a record for abandoned before its owner has locked it. OSError unless it
    is this user's alone: whoever can write there names what is removed."""
    RECORDS.mkdir(mode=0o700, exist_ok=True)
    handle = os.open(RECORDS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"{RECORDS}: owner {found.st_uid}, mode {found.st_mode & 0o777:o};"
                f" allowed: a folder of user {os.geteuid()} with mode 700. Remove it, if nobody needs it"
            )
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield RECORDS
    finally:
        os.close(handle)
