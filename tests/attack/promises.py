"""What every surface promises of a bad input, as functions that the probes of all surfaces call."""

import contextlib
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

# A message comes in seconds, and before memory is taken: what an input claims is not what it gets.
SECONDS = 20
MEMORY = 8 << 30


def refuses(call: Callable[[], object], error: type[Exception], *words: object) -> str:
    """`call` raises `error`, the documented class or a subclass, and its message has all `words`; the message."""
    try:
        result = call()
    except error as raised:
        message = str(raised)
    else:
        raise AssertionError(f"accepted: {result!r}")
    missing = [str(word) for word in words if str(word) not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def command(
    arguments: Sequence[object], cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run `repro ARGUMENTS` in `cwd` with bounded time and memory."""
    return subprocess.run(
        [sys.executable, "-c", "from repro.cli import app; app()", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | (env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )


def command_refuses(
    arguments: Sequence[object], cwd: Path, *words: object, env: Mapping[str, str] | None = None
) -> str:
    """`repro ARGUMENTS` ends with exit code 1 or 2 and a message that has all `words`, without a traceback."""
    ended = command(arguments, cwd, env)
    said = ended.stderr + ended.stdout
    assert ended.returncode in (1, 2), f"exit code {ended.returncode}: {said}"
    assert "Traceback" not in said, said
    missing = [str(word) for word in words if str(word) not in said]
    assert not missing, f"{missing} not in: {said}"
    return said


def make_socket(path: Path) -> None:
    """A file that is a socket. Its path may have 108 bytes, so it is bound from its folder."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
