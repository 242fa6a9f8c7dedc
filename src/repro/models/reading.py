"""What all loaders do with files that a stranger may have written: every error names the file, and is a
FileNotFoundError where there is none, else a ValueError."""

import contextlib
import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

_MOST_JSON = 64 << 20  # bytes; the index of a thousand shards has one


def ordinary_file(path: Path) -> Path:
    """The path; FileNotFoundError where nothing is, ValueError for a folder, or a FIFO, which would be waited for."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # the name is too long, or holds a zero byte
        raise ValueError(f"{path}: {error}") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: not an ordinary file")
    return path


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A ValueError in the block is raised again with `path` in front."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@contextlib.contextmanager
def wording(names: Mapping[str, str]) -> Iterator[None]:
    """A ValueError in the block is raised again with our names of sizes replaced by the file's (`names`: by ours)."""
    try:
        yield
    except ValueError as error:
        ours = rf"\b({'|'.join(names)})\b"
        raise ValueError(re.sub(ours, lambda found: names[found[0]], str(error))) from error


def json_object(path: Path) -> dict[str, Any]:
    """The object in the file, as a dict. FileNotFoundError; ValueError where the file holds no JSON object, holds a key
    twice, or is larger than `_MOST_JSON`. Both name the file."""
    size = ordinary_file(path).stat().st_size
    if size > _MOST_JSON:
        raise ValueError(f"{path}: {size} bytes, allowed: at most {_MOST_JSON}")
    try:
        found = json.loads(path.read_bytes().decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:  # JSON, UTF-8, or nested too deeply
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds a {type(found).__name__}, allowed: an object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def finite(name: str, weight: Tensor) -> Tensor:
    """The weight; ValueError where one of its numbers is NaN or infinite: every token would be noise."""
    # One pass without a copy: both ends are NaN where any number is.
    if weight.numel() and not all(end.isfinite() for end in weight.aminmax()):
        raise ValueError(f"{name} holds NaN or infinite numbers")
    return weight
