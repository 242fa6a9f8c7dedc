"""Trace files of any content: what a stranger could hand to `repro place`, and the parsers that are fuzzed."""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from attack.fuzz import Parser

from repro import exflow

Member = np.ndarray | bytes

TOKENS = 60
EXPERTS = np.random.default_rng(0).integers(0, 8, (TOKENS, 3)).astype(np.uint8)


def npy(array: np.ndarray) -> bytes:
    """An .npy file, pickled where the dtype needs it."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def header(text: str, data: bytes = b"", version: int = 1, length: int | None = None) -> bytes:
    """An .npy file of any header; `length`: what it claims for its header."""
    claimed = (len(text) if length is None else length).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes((version, 0)) + claimed + text.encode("latin1") + data


def described(
    descr: str = "|u1",
    shape: str = "(60, 3)",
    fortran: str = "False",
    data: bytes = EXPERTS.tobytes(),
    version: int = 1,
) -> bytes:
    """An .npy file whose header has these words as values; `descr` is quoted."""
    return header(f"{{'descr': {descr!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n", data, version)


def archive(path: Path, *members: tuple[str, Member], compression: int = zipfile.ZIP_STORED) -> Path:
    """A zip of members under any names, in order, also twice."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members:
            file.writestr(zipfile.ZipInfo(name), content if isinstance(content, bytes) else npy(content), compression)
    return path


def npz(path: Path, experts: Member = EXPERTS, **others: Member) -> Path:
    return archive(path, *((f"{name}.npy", content) for name, content in {"experts": experts, **others}.items()))


def claiming(path: Path, size: int) -> Path:
    """An archive of a few bytes whose `experts` claims `size` bytes, in the zip and in its own header."""
    content = described(shape=f"({size // 2}, 2)", data=b"")
    npz(path, content)
    whole, held = path.read_bytes(), len(content).to_bytes(4, "little")
    begin = whole.index(b"PK\x01\x02")  # its entry in the directory: sizes of 4 bytes, or ff and an extra field of 8
    entry = bytearray(whole[begin:])
    entry[24:28], entry[30:32] = b"\xff" * 4, (12).to_bytes(2, "little")
    assert whole[begin + 24 : begin + 28] == held
    name = 46 + len("experts.npy")
    extra = b"\x01\x00\x08\x00" + (size + len(content)).to_bytes(8, "little")
    entry[name:name] = extra
    end = entry.index(b"PK\x05\x06")
    entry[end + 12 : end + 16] = (int.from_bytes(entry[end + 12 : end + 16], "little") + len(extra)).to_bytes(
        4, "little"
    )
    path.write_bytes(whole[:begin] + entry)
    return path


def parquet(path: Path, columns: dict[str, object] | pyarrow.Table) -> Path:
    pyarrow.parquet.write_table(columns if isinstance(columns, pyarrow.Table) else pyarrow.table(columns), path)
    return path


def read(path: Path) -> object:
    """What `repro place` does first with a trace; counts of thousands of experts would only take time."""
    trace = exflow.load_trace(path)
    return exflow.transitions(trace) if trace.num_experts <= 64 else trace


def _npz_files(folder: Path) -> Sequence[Path]:
    lengths, weights = np.array([20, 40]), np.ones(EXPERTS.shape, np.float16)
    every = {"seq_len": lengths, "num_experts": np.array(8), "weights": weights}
    deflated = archive(
        folder / "deflated.npz",
        ("experts.npy", np.asfortranarray(EXPERTS.astype(">i4"))),
        ("seq_len.npy", lengths.astype(np.uint64)),
        compression=zipfile.ZIP_DEFLATED,
    )
    return [npz(folder / "all.npz", **every), npz(folder / "plain.npz"), deflated]


def _npy_files(folder: Path) -> Sequence[Path]:
    (folder / "two.npy").write_bytes(npy(EXPERTS))
    (folder / "three.npy").write_bytes(npy(EXPERTS.astype(np.int64)[:, :, None]))
    return [folder / "two.npy", folder / "three.npy"]


def _parquet_files(folder: Path) -> Sequence[Path]:
    columns = {f"layer{i}": EXPERTS[:, i] for i in range(3)}
    return [
        parquet(folder / "plain.parquet", columns),
        parquet(folder / "sequences.parquet", {**columns, "sequence": np.arange(TOKENS, dtype=np.uint16) // 20}),
    ]


NPZ, NPY, PARQUET = (Parser(files, read, (ValueError,)) for files in (_npz_files, _npy_files, _parquet_files))
