"""A checkpoint on disk: what each rank wrote, and an index in JSON that says where the values of every tensor are.

    rank-00003.bin       the values that rank 3 wrote, as they are in memory, one chunk after the other
    index.json           format, step, what is no tensor, and of every tensor its dtype, size and chunks with checksums
    index.json.sha256    checksum of the index, as `sha256sum` writes it

Nothing in it is code, and nothing in it is believed. The index is read when it has its checksum; chunks must fill the
tensors and the files without a gap or an overlap, so a reader takes no more memory than the files have bytes; and the
bytes of a chunk are used when they have theirs. Only ordinary files are opened, under the names above.
"""

import json
import math
import os
import reprlib
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from repro.zero.checkpoint_json import from_json

FORMAT = 2
INDEX, CHECKSUM = "index.json", "index.json.sha256"
CHUNK_BYTES = 1 << 22  # what is read to use one value of it, and its line in the index is 100 bytes
INDEX_BYTES = 1 << 28  # of 20 billion parameters on 384 ranks: 1 << 24
_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}


class CheckpointError(ValueError):
    """There is no checkpoint, it is damaged, or it is not of this model: the message names the file and the tensor."""


class Run(NamedTuple):
    """`values`, flat, are those of a flat tensor of `total` values from position `start` on."""

    key: str
    start: int
    total: int
    values: Tensor


class Chunk(NamedTuple):
    """`numel` values of a tensor from position `start` on: the rank that wrote them, the offset of their bytes in its
    file, and the checksum of these."""

    start: int
    numel: int
    rank: int
    offset: int
    sha256: str


class Entry(NamedTuple):
    """A flat tensor of `numel` values; its chunks in order."""

    dtype: torch.dtype
    numel: int
    chunks: list[Chunk]


# --- writing ---


def write_runs(folder: Path, rank: int, runs: Iterable[Run]) -> dict[str, Entry]:
    """Write the file of a rank: entries with the chunks that are in it. TypeError for a dtype that is not in DTYPES."""
    entries: dict[str, Entry] = {}
    with open(_rank_file(folder, rank), "xb") as file:
        for key, start, total, values in runs:
            if values.dtype not in DTYPES.values():
                raise TypeError(f"{key} is {values.dtype}, allowed: {', '.join(DTYPES)}")
            entry = entries.setdefault(key, Entry(values.dtype, total, []))
            for part in values.detach().split(CHUNK_BYTES // values.element_size()):
                if part.numel():
                    data = part.cpu().contiguous().view(torch.uint8).numpy()
                    entry.chunks.append(Chunk(start, part.numel(), rank, file.tell(), sha256(data).hexdigest()))
                    start += part.numel()
                    file.write(data)
        _sync_file(file)
    return entries


def write_index(folder: Path, step: int, info: Mapping[str, Any], of_ranks: Iterable[Mapping[str, Entry]]) -> None:
    """Write the index of what all ranks wrote. `info`: as JSON has it, see `to_json`."""
    merged: dict[str, Entry] = {}
    for written in of_ranks:
        for key, entry in written.items():
            merged.setdefault(key, Entry(entry.dtype, entry.numel, [])).chunks.extend(entry.chunks)
    tensors = {
        key: {"dtype": str(entry.dtype).removeprefix("torch."), "numel": entry.numel, "chunks": sorted(entry.chunks)}
        for key, entry in merged.items()
    }
    text = json.dumps({"format": FORMAT, "step": step, "info": info, "tensors": tensors}, allow_nan=False).encode()
    for name, content in ((INDEX, text), (CHECKSUM, checksum_line(text))):
        with open(folder / name, "xb") as file:
            file.write(content)
            _sync_file(file)
    read_index(folder)  # what nobody could read must not become a checkpoint
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make new files in a folder, or a rename, survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum_line(text: bytes) -> bytes:
    """What `index.json.sha256` holds for an index of this text."""
    return f"{sha256(text).hexdigest()}  {INDEX}\n".encode()


def info_key(number: int) -> str:
    """Key of a tensor that is part of `info`."""
    return f"info/{number}"


def _sync_file(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.bin"


# --- reading ---


@dataclass(frozen=True)
class Index:
    """The index of the checkpoint in `folder`, checked. `text_sha256` tells whether two ranks read the same."""

    folder: Path
    text_sha256: str
    step: int
    entries: dict[str, Entry]
    info_as_json: dict[str, Any]

    def fill(self, key: str, start: int, out: Tensor) -> None:
        """Copy the values of a tensor from position `start` on to `out`, flat. CheckpointError names a chunk that
        cannot be read or has not its checksum."""
        entry = self.entries[key]
        for chunk in entry.chunks:
            first, last = max(start, chunk.start), min(start + out.numel(), chunk.start + chunk.numel)
            if first < last:
                values = self._values(key, entry.dtype, chunk)
                out[first - start : last - start].copy_(values[first - chunk.start : last - chunk.start])

    def tensor(self, key: str, shape: list[int]) -> Tensor:
        """A whole tensor, on the CPU. CheckpointError where there is none of this shape."""
        entry = self.entries.get(key)
        if entry is None or not _is_shape(shape, entry.numel):
            found = f"{entry.numel} values" if entry else "no values"
            raise CheckpointError(f"{self.folder / INDEX}: {key} has {found}, wanted: of shape {reprlib.repr(shape)}")
        values = torch.empty(entry.numel, dtype=entry.dtype)
        self.fill(key, 0, values)
        return values.view(shape)

    def info(self, name: str) -> Any:
        """One of the things that are no tensor, as it was before `to_json`. CheckpointError where it is not."""
        try:
            return from_json(self.info_as_json[name], lambda number, shape: self.tensor(info_key(number), shape))
        except CheckpointError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{self.folder / INDEX}: {name!r} of 'info' cannot be read: {error!r}") from error

    def _values(self, key: str, dtype: torch.dtype, chunk: Chunk) -> Tensor:
        path = _rank_file(self.folder, chunk.rank)
        data = bytearray(_read(path, chunk.offset, chunk.numel * dtype.itemsize))
        if sha256(data).hexdigest() != chunk.sha256:
            raise CheckpointError(
                f"{path}: {key}, values {chunk.start} to {chunk.start + chunk.numel}, has not the checksum that is in "
                f"{INDEX}: the file is damaged or of another checkpoint"
            )
        values = torch.frombuffer(data, dtype=torch.uint8)
        return values.ne(0) if dtype == torch.bool else values.view(dtype)  # a bool of another byte is no bool


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, checked, with the sizes of the files; values are not read yet. CheckpointError."""
    path = folder / INDEX
    text, line = _read_all(path), _read_all(folder / CHECKSUM)
    if line != checksum_line(text):
        raise CheckpointError(f"{path} has not the checksum that is in {CHECKSUM}: one of them is damaged")
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
        if _field(found, "format", int) != FORMAT:
            raise CheckpointError(f"{path} has format {found['format']}, this version reads {FORMAT}")
        entries = {key: _entry(path, key, entry) for key, entry in _field(found, "tensors", dict).items()}
        index = Index(
            folder, sha256(text).hexdigest(), _field(found, "step", int), entries, _field(found, "info", dict)
        )
    except CheckpointError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index of a checkpoint: {error}") from error
    _check_files(index)
    return index


def _entry(path: Path, key: str, found: Any) -> Entry:
    """An entry of the index. CheckpointError unless its chunks have every value once."""
    try:
        dtype, numel = _field(found, "dtype", str), _field(found, "numel", int)
        if dtype not in DTYPES:
            raise ValueError(f"dtype {reprlib.repr(dtype)}, allowed: {', '.join(DTYPES)}")
        chunks, end = [Chunk(*chunk) for chunk in _field(found, "chunks", list)], 0
        for chunk in chunks:
            if not all(map(_is_size, chunk[:4])) or not chunk.numel:
                raise ValueError(f"chunk {reprlib.repr(tuple(chunk))}, allowed: start, numel, rank, offset, checksum")
            if chunk.start != end:
                raise ValueError(f"a chunk from value {chunk.start} on, allowed: {end}, where the one before ends")
            end += chunk.numel
        if end != numel:
            raise ValueError(f"chunks up to value {end}, allowed: {numel}, all of them")
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {key}: {error}") from error
    return Entry(DTYPES[dtype], numel, chunks)


def _check_files(index: Index) -> None:
    """The chunks fill the files: what the index claims is there, and no bytes are claimed twice."""
    of_rank: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for key, entry in index.entries.items():
        for chunk in entry.chunks:
            of_rank[chunk.rank].append((chunk.offset, chunk.numel * entry.dtype.itemsize, key))
    for rank, parts in of_rank.items():
        path, end = _rank_file(index.folder, rank), 0
        for offset, size, key in sorted(parts):
            if offset != end:
                raise CheckpointError(
                    f"{index.folder / INDEX}: {key} is at byte {offset} of {path.name}, allowed: {end}"
                )
            end += size
        with _ordinary(path) as file:
            if (found := os.fstat(file.fileno()).st_size) != end:
                raise CheckpointError(f"{path} has {found} bytes, by {INDEX} {end}")


@contextmanager
def _ordinary(path: Path) -> Iterator[BinaryIO]:
    """An ordinary file, open for reading. CheckpointError for a link, a pipe, a device, and where reading fails."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would wait for a writer
    try:
        with open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no ordinary file")
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} is no ordinary file that can be read: {error.strerror}") from error


def _read(path: Path, offset: int, size: int) -> bytes:
    """Exactly `size` bytes of a file from `offset` on. CheckpointError."""
    with _ordinary(path) as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise CheckpointError(f"{path} ends at byte {offset + len(data)}, by {INDEX} it goes on to {offset + size}")
    return data


def _read_all(path: Path) -> bytes:
    with _ordinary(path) as file:
        if (found := os.fstat(file.fileno()).st_size) > INDEX_BYTES:
            raise CheckpointError(f"{path} has {found} bytes, allowed: {INDEX_BYTES}")
        return file.read(INDEX_BYTES)


def _field(found: Any, name: str, kind: type) -> Any:
    """A value of a dict of JSON; ValueError unless it is there and of a type."""
    value = found.get(name) if isinstance(found, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{name!r} is {reprlib.repr(value)}, allowed: {kind.__name__}")
    return value


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _is_shape(shape: Any, numel: int) -> bool:
    sizes = isinstance(shape, list) and all(map(_is_size, shape))
    return sizes and math.prod(shape) == numel and math.prod(filter(None, shape)) < 2**63  # [2**62, 2**62, 0]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{reprlib.repr(twice)} is there twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
