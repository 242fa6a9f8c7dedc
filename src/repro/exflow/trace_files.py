"""Read routing traces from files that a stranger may have written.

What a file claims is compared with what it holds and with what is allowed before memory is taken for it. Nothing is
unpickled, and whatever is wrong is a ValueError that names the file.
"""

import contextlib
import io
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.lib import format as npy

from repro.exflow.trace import Trace, check_shape

MOST_BYTES = 4 << 30  # that a trace may take which is read as a whole; an .npy file is mapped instead
MOST_HEADER = 10_000  # bytes, NumPy's own limit

# What an .npz may hold beside `experts`: name, kinds of dtype, dimensions, in words.
OPTIONAL = (
    ("seq_len", "iu", 1, "integers [sequences], the tokens of each"),
    ("num_experts", "iu", 0, "one integer"),
    ("weights", "fiu", None, "numbers, shaped like `experts`"),
)


def load_trace(path: str | Path, num_experts: int | None = None, top_k: int | None = None) -> Trace:
    """Read a trace; ValueError names the file and what is wrong with it, FileNotFoundError when there is none.

    `.npy`      [tokens, layers] or [tokens, layers, k], integers of any size and byte order; memory-mapped
    `.npz`      `experts` of such a shape; optional `seq_len` [sequences] (tokens of each), `num_experts`, and `weights`
    `.parquet`  one integer column per layer, in order; an optional integer column `sequence`

    `num_experts`: experts per layer; None takes the file's, else the highest id + 1 (too low if the last expert is
    never used). `top_k`: keep the first k experts of a top-k trace; None keeps all. An `.npz` or `.parquet` may hold
    MOST_BYTES; longer traces are `.npy`.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such trace")
    if not path.is_file():
        raise ValueError(f"{path}: a folder, pipe or device, allowed: an ordinary file")
    readers = {".npy": _read_npy, ".npz": _read_npz, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of trace {path.suffix!r}, allowed: {', '.join(readers)}")
    found = readers[path.suffix](path)
    if num_experts is not None:
        found["num_experts"] = num_experts
    found.setdefault("num_experts", max(int(found["experts"].max()), 0) + 1)
    trace = Trace(source=str(path), **found)
    return trace if top_k is None else trace.top(top_k)


@contextlib.contextmanager
def _decoding(what: str, kind: str) -> Iterator[None]:
    """What NumPy, zipfile and Arrow raise on broken bytes is of any class, documented or not: here a ValueError."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: not {kind}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Header:
    """What an .npy file or a member of an .npz says of its array, which begins `offset` bytes after the beginning."""

    shape: tuple[int, ...]
    order: Literal["C", "F"]
    dtype: np.dtype
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _header(stream: IO[bytes], held: int, what: str) -> _Header:
    """The header of a stream of `held` bytes; ValueError unless it claims just what follows it."""
    with _decoding(what, "a NumPy array"):
        start = io.BytesIO(stream.read(MOST_HEADER))  # a header may claim 4 GiB for itself
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(start)]
        shape, fortran, dtype = read(start)
    found = _Header(shape, "F" if fortran else "C", dtype, start.tell())
    if min(shape, default=0) < 0 or found.bytes != held - found.offset:
        claims = f"its header claims {dtype} {shape}, {found.bytes:,} bytes"
        raise ValueError(f"{what}: {claims}, but {held - found.offset:,} bytes follow it")
    return found


def _read_npy(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header = _header(file, path.stat().st_size, str(path))
    check_shape(header.dtype, header.shape, str(path))
    return {"experts": np.memmap(path, header.dtype, "r", header.offset, header.shape, header.order)}


def _read_npz(path: Path) -> dict[str, Any]:
    with _decoding(str(path), "a NumPy archive"):
        archive = zipfile.ZipFile(path)
    with archive:
        members = archive.namelist()
        headers = {}
        for name in ("experts", *(name for name, *_ in OPTIONAL)):
            if (number := members.count(f"{name}.npy")) > 1:
                raise ValueError(f"{path}: `{name}` is in it {number} times, allowed: once")
            if number:
                headers[name] = _member_header(archive, path, name)
        if "experts" not in headers:
            shown = ", ".join(map(ascii, members[:10])) + ", ..." * (len(members) > 10)
            raise ValueError(f"{path}: no array `experts`, found: {shown or 'nothing'}")
        _check_members(headers, path)
        found: dict[str, Any] = {}
        for name in headers:
            with _decoding(f"{path}: `{name}`", "a NumPy array"), archive.open(f"{name}.npy") as stream:
                found[name] = npy.read_array(stream, allow_pickle=False)
    if "num_experts" in found:
        found["num_experts"] = int(found["num_experts"])
    if "seq_len" in found:
        found["sequences"] = _sequences(found.pop("seq_len"), len(found["experts"]), path)
    return found


def _member_header(archive: zipfile.ZipFile, path: Path, name: str) -> _Header:
    what, member = f"{path}: `{name}`", archive.getinfo(f"{name}.npy")
    with _decoding(what, "readable"):  # an encrypted one is not
        stream = archive.open(member)
    with stream:
        return _header(stream, member.file_size, what)


def _check_members(headers: dict[str, _Header], path: Path) -> None:
    """ValueError unless the arrays have the dtypes and shapes of a trace, and fit into MOST_BYTES together."""
    experts = headers["experts"]
    check_shape(experts.dtype, experts.shape, str(path))
    for name, kinds, dimensions, words in OPTIONAL:
        if (header := headers.get(name)) is None:
            continue
        fits = header.shape == experts.shape if dimensions is None else len(header.shape) == dimensions
        if header.dtype.kind not in kinds or not fits:
            raise ValueError(f"{path}: `{name}` is {header.dtype} {header.shape}, allowed: {words}")
    tokens, sequences = experts.shape[0], headers["seq_len"].shape[0] if "seq_len" in headers else 0
    claimed = sum(header.bytes for header in headers.values()) + 8 * (sequences and tokens + sequences)
    _check_size(claimed, path)


def _check_size(claimed: int, path: Path) -> None:
    if claimed > MOST_BYTES:
        allowed = f"allowed: {MOST_BYTES:,}; a longer trace can be an .npy file"
        raise ValueError(f"{path}: it claims arrays of {claimed:,} bytes, {allowed}")


def _sequences(lengths: np.ndarray, tokens: int, path: Path) -> np.ndarray:
    """int64 [tokens], the sequence of each token, of the tokens of each sequence."""
    wrong = lengths[(lengths < 0) | (lengths > tokens)]  # lengths of at most `tokens` cannot overflow their sum
    if len(wrong):
        raise ValueError(f"{path}: `seq_len` has a sequence of {wrong[0]} tokens, but `experts` has {tokens} tokens")
    lengths = lengths.astype(np.int64)
    if (total := lengths.sum()) != tokens:
        raise ValueError(f"{path}: `seq_len` sums to {total}, but `experts` has {tokens} tokens")
    return np.repeat(np.arange(len(lengths)), lengths)


def _read_parquet(path: Path) -> dict[str, Any]:
    with _decoding(str(path), "a Parquet file"):
        file = pyarrow.parquet.ParquetFile(path)
        fields, groups = list(file.schema_arrow), [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    with file:
        names, rows = [field.name for field in fields], sum(group.num_rows for group in groups)
        for field in fields:
            if not pyarrow.types.is_integer(field.type):
                raise ValueError(f"{path}: column {field.name!r} is {field.type}, allowed: integers")
        if names.count("sequence") > 1:
            raise ValueError(f"{path}: {names.count('sequence')} columns are named 'sequence', allowed: one")
        check_shape(np.dtype(np.int64), (rows, len(names) - names.count("sequence")), str(path))
        _check_size(8 * rows * len(names), path)
        with _decoding(str(path), "a Parquet file"):
            table = file.read()
    columns = [_integers(column, f"{path}: column {name!r}") for name, column in zip(names, table.columns, strict=True)]
    sequences = columns.pop(names.index("sequence")) if "sequence" in names else None
    return {"experts": np.stack(columns, axis=1), "sequences": sequences}


def _integers(column: pyarrow.ChunkedArray, what: str) -> np.ndarray:
    """int64; ValueError where a row is empty or beyond that."""
    if column.null_count:
        raise ValueError(f"{what} has {column.null_count} rows without a value, allowed: none")
    with _decoding(what, "int64"):
        return column.cast(pyarrow.int64()).to_numpy()
