"""Routing traces, machines and limits of `repro place` and `repro.exflow`: what is read, what is refused and how.

A refusal is a ValueError that names the file and what is wrong with it; on the command line a message and exit code 2.
"""

import importlib
import json
import math
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from attack import trace_files
from attack.promises import command_refuses, refuses
from attack.trace_files import EXPERTS, TOKENS, archive, claiming, described, header, npy, npz, parquet
from typer.testing import CliRunner

from repro import cli, exflow
from repro.exflow import bound, paper
from repro.exflow.trace import transitions

E = EXPERTS


class Evil:
    def __reduce__(self):
        return os.system, ("touch EVIL",)


def pickled(shape: tuple[int, ...] = ()) -> bytes:
    """An .npy file whose unpickling makes a file EVIL."""
    objects = np.empty(shape, object)
    objects[...] = Evil()
    return npy(objects)


def zip_without(change) -> object:
    """Makes an archive that `change` has edited, bytes to bytes."""

    def make(path: Path) -> Path:
        npz(path, E, seq_len=np.array([20, 40]))
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def encrypted(data: bytes) -> bytes:
    """With the flag that members are encrypted, in each of their two headers."""
    found = bytearray(data)
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        begin = found.find(magic)
        while begin >= 0:
            found[begin + flags] |= 1
            begin = found.find(magic, begin + 4)
    return bytes(found)


def replaced(old: bytes, new: bytes):
    def change(data: bytes) -> bytes:
        assert old in data and len(old) == len(new)
        return data.replace(old, new)

    return zip_without(change)


def sequences(*lengths: int, dtype="i8"):
    return lambda path: npz(path, E, seq_len=np.array(lengths, dtype))


def member(name: str, content: object):
    content = np.asarray(content) if not isinstance(content, bytes) else content
    return lambda path: npz(path, E, **{name: content})


MOST = 2**63 - 1
ARCHIVES = {
    "lengths whose sum wraps around to the tokens": (sequences(MOST, MOST, TOKENS + 2), ("`seq_len`", MOST, TOKENS)),
    "unsigned lengths whose sum wraps around": (sequences(2**64 - 1, TOKENS + 1, dtype="u8"), ("`seq_len`", 2**64 - 1)),
    "a length beyond the tokens": (sequences(0, TOKENS + 1), ("`seq_len`", TOKENS + 1, f"{TOKENS} tokens")),
    "a negative length": (sequences(-1, TOKENS + 1), ("`seq_len`", -1)),
    "a negative length in bytes": (sequences(-128, TOKENS, dtype="i1"), ("`seq_len`", -128)),
    "lengths that sum to fewer": (sequences(20, 39), ("`seq_len` sums to 59", f"{TOKENS} tokens")),
    "lengths that sum to more": (sequences(20, 41), ("`seq_len` sums to 61",)),
    "no lengths": (sequences(), ("`seq_len` sums to 0",)),
    "lengths in two dimensions": (member("seq_len", [[20, 40]]), ("`seq_len` is int64 (1, 2)", "[sequences]")),
    "one length without dimension": (member("seq_len", TOKENS), ("`seq_len` is int64 ()",)),
    "fractional lengths": (member("seq_len", [20.0, 40.0]), ("`seq_len` is float64",)),
    "durations as lengths": (member("seq_len", np.array([20, 40], "m8[s]")), ("`seq_len` is timedelta64[s]",)),
    "truths as lengths": (member("seq_len", np.ones(TOKENS, bool)), ("`seq_len` is bool",)),
    "pickled lengths": (member("seq_len", pickled((2,))), ("`seq_len`",)),
    "two numbers of experts": (member("num_experts", [4, 4]), ("`num_experts` is int64 (2,)", "one integer")),
    "a fractional number of experts": (member("num_experts", 8.0), ("`num_experts` is float64",)),
    "a duration as number of experts": (member("num_experts", np.timedelta64(8, "s")), ("`num_experts` is timedelta",)),
    "a word as number of experts": (member("num_experts", "8"), ("`num_experts` is <U1",)),
    "a pickled number of experts": (member("num_experts", pickled()), ("`num_experts`",)),
    "no expert": (member("num_experts", 0), ("num_experts is 0", "1 to 4096")),
    "fewer than no expert": (member("num_experts", -8), ("num_experts is -8",)),
    "more experts than any model": (member("num_experts", 4097), ("num_experts is 4097", "1 to 4096")),
    "2^64 experts": (member("num_experts", np.uint64(2**64 - 1)), ("num_experts is 18446744073709551615",)),
    "fewer experts than are named": (member("num_experts", 7), ("row ", "expert 7 is not in 0..6")),
    "weights of another shape": (member("weights", np.ones((TOKENS, 2))), ("`weights` is float64 (60, 2)",)),
    "words as weights": (member("weights", np.full(E.shape, "a")), ("`weights` is <U1",)),
    "complex weights": (member("weights", np.ones(E.shape, complex)), ("`weights` is complex128",)),
    "pickled weights": (member("weights", pickled(E.shape)), ("`weights`",)),
    "lengths that are no array": (member("seq_len", b"20, 40"), ("`seq_len`", "not a NumPy array")),
    "an empty member": (member("seq_len", b""), ("`seq_len`", "not a NumPy array")),
    "experts under a plain name": (lambda p: archive(p, ("experts", E)), ("no array `experts`", "'experts'")),
    "experts in a folder of the archive": (lambda p: archive(p, ("a/experts.npy", E)), ("no array `experts`",)),
    "experts as a folder of the archive": (lambda p: archive(p, ("experts.npy/", b"")), ("no array `experts`",)),
    "no member": (archive, ("no array `experts`", "nothing")),
    "other members only": (
        lambda p: archive(p, *((f"a{i}.npy", E) for i in range(99))),
        ("no array `experts`", "a9.npy", "..."),
    ),
    "a member's name with an escape sequence": (lambda p: archive(p, ("\x1b[31m", E)), ("'\\x1b[31m'",)),
    "experts twice": (lambda p: archive(p, ("experts.npy", E), ("experts.npy", E)), ("`experts` is in it 2 times",)),
    "lengths twice": (
        lambda p: archive(p, ("experts.npy", E), *[("seq_len.npy", np.array([20, 40]))] * 2),
        ("`seq_len` is in it 2 times",),
    ),
    "13 GiB from a few bytes": (lambda p: claiming(p, 13 << 30), ("13,958,643,7", "4,294,967,296", ".npy")),
    "2^62 bytes from a few": (lambda p: claiming(p, 1 << 62), ("4,611,686,018,427,387,9", "4,294,967,296")),
    "10^12 experts from none": (
        member("seq_len", described("<i8", "(1000000000000,)", data=b"")),
        ("8,000,000,000,000",),
    ),
    "a member that expands beyond its size": (replaced(b"\x34\x01\x00\x00", b"\x33\x01\x00\x00"), ("`experts`",)),
    "encrypted members": (zip_without(encrypted), ("`experts`", "encrypted")),
    "an unknown compression": (
        zip_without(lambda data: data.replace(b"\x14\x00\x00\x00\x00\x00", b"\x14\x00\x00\x00\x63\x00")),
        ("`experts`",),
    ),
    "one bit flipped": (zip_without(lambda data: data.replace(E.tobytes(), E[::-1].tobytes())), ("`experts`", "CRC")),
    "cut in the middle": (zip_without(lambda data: data[: len(data) // 2]), ("not a NumPy archive",)),
    "cut before its end": (zip_without(lambda data: data[:-1]), ("not a NumPy archive",)),
    "directory only": (zip_without(lambda data: data[data.index(b"PK\x01\x02") :]), ("t.npz",)),
    "empty": (zip_without(lambda data: b""), ("not a NumPy archive",)),
    "text": (zip_without(lambda data: b"1,2,3\n"), ("not a NumPy archive",)),
    "an array": (zip_without(lambda data: npy(E)), ("not a NumPy archive",)),
    "zeros": (zip_without(lambda data: bytes(4096)), ("not a NumPy archive",)),
}

TOO_DEEP = "(" * 4000 + ")" * 4000
HEADERS = {
    "a negative dimension": (described(shape="(-60, 3)"), "(-60, 3)"),
    "two negative dimensions": (described(shape="(-60, -3)"), "(-60, -3)"),
    "more than there is": (described(shape="(1000000000000, 3)"), "3,000,000,000,000 bytes, but 180 bytes follow"),
    "less than there is": (described(shape="(59, 3)"), "177 bytes, but 180 bytes follow"),
    "a product that wraps around to nothing": (described(shape="(4294967296, 4294967296)", data=b""), "0 bytes follow"),
    "a product that wraps around to what there is": (described(shape=f"({(2**64 + 180) // 4}, 4)"), "180 bytes follow"),
    "a dimension beyond 64 bits": (described(shape=f"({2**64}, 3)"), "180 bytes follow"),
    "nothing beyond 64 bits": (described(shape=f"(0, {2**64})", data=b""), "at least one token"),
    "ids cut off": (described(data=E.tobytes()[:-1]), "180 bytes, but 179 bytes follow"),
    "ids and more": (described(data=E.tobytes() + b"\0"), "180 bytes, but 181 bytes follow"),
    "a list as shape": (described(shape="[60, 3]"), "shape is not valid"),
    "a number as shape": (described(shape="180"), "shape is not valid"),
    "fractions as shape": (described(shape="(60.0, 3.0)"), "shape is not valid"),
    "a number as order": (described(fortran="1"), "fortran_order is not a valid bool"),
    "a call in the header": (described(shape="__import__('os').system('touch EVIL')"), "not a NumPy array"),
    "a deep header": (described(shape=TOO_DEEP), "not a NumPy array"),
    "an open bracket": (described(shape="((((60, 3)"), "not a NumPy array"),
    "a null in the header": (described(shape="(60, 3)\0"), "not a NumPy array"),
    "keys missing": (header("{'descr': '|u1'}\n", E.tobytes()), "correct keys"),
    "a key too many": (header("{'descr': '|u1', 'fortran_order': False, 'shape': (60, 3), 'x': 1}"), "correct keys"),
    "keys of several kinds": (header("{1: '|u1', 'fortran_order': False, b'shape': (60, 3)}"), "not a NumPy array"),
    "a list as header": (header("['|u1', False, (60, 3)]\n"), "not a dictionary"),
    "an empty header": (header(""), "not a NumPy array"),
    "a header beyond the file": (header("{", length=60_000), "not a NumPy array"),
    "a header of 4 GiB": (header("{" + " " * 20_000, version=2, length=2**32 - 1), "not a NumPy array"),
    "a long header": (header("{" + " " * 30_000 + "}"), "not a NumPy array"),
    "version 3": (header("{}", version=3), "not a NumPy array"),
    "version 255": (header("{}", version=255), "not a NumPy array"),
    "another magic": (b"\x94NUMPY" + described()[6:], "magic string"),
    "the magic alone": (b"\x93NUMPY", "not a NumPy array"),
    "no byte": (b"", "not a NumPy array"),
    "text": (b"1,2,3\n", "not a NumPy array"),
    "an unknown dtype": (described("nonsense"), "not a NumPy array"),
    "a dtype of nothing": (described(""), "t."),
    "ids of no byte": (described("|V0", data=b""), "dtype is"),
    "raw ids": (described("|V1"), "dtype is |V1"),
    "fractional ids": (npy(E.astype(float)), "dtype is float64"),
    "half ids": (npy(E.astype(np.float16)), "dtype is float16"),
    "complex ids": (npy(E.astype(complex)), "dtype is complex128"),
    "truths as ids": (npy(E > 3), "dtype is bool"),
    "durations as ids": (npy(E.astype("m8[s]")), "dtype is timedelta64[s]"),
    "dates as ids": (npy(E.astype("M8[s]")), "dtype is datetime64[s]"),
    "words as ids": (npy(E.astype(str)), "dtype is <U3"),
    "bytes as ids": (npy(E.astype("S3")), "dtype is |S3"),
    "records as ids": (npy(E.astype([("a", "u1")])), "dtype is [('a', 'u1')]"),
    "pickled ids": (pickled(E.shape), "t."),
    "no dimension": (npy(np.array(3)), "shape is ()"),
    "one dimension": (npy(E[:, 0]), "shape is (60,)"),
    "four dimensions": (npy(E[:, :, None, None]), "shape is (60, 3, 1, 1)"),
    "no token": (npy(E[:0]), "at least one token"),
    "no layer": (npy(E[:, :0]), "two layers"),
    "one layer": (npy(E[:, :1]), "two layers"),
    "no expert of a token": (npy(E[:, :, None][:, :, :0]), "need at least one token"),
    "layers by tokens": (npy(np.zeros((24, 4097), np.uint8)), "4097 layers, allowed: at most 4096"),
    "a negative id": (npy(E.astype(np.int8) - 1), "expert -1 is not in 0..6"),
    "negative ids only": (npy(np.full((9, 2), -3)), "row 0, layer 0: expert -3 is not in 0..0"),
    "the least id": (npy(np.full((9, 2), -(2**63))), "expert -9223372036854775808"),
    "the largest id": (npy(np.full((9, 2), 2**63 - 1)), "num_experts is 9223372036854775808, allowed: 1 to 4096"),
    "the largest unsigned id": (npy(np.full((9, 2), 2**64 - 1, np.uint64)), "num_experts is 18446744073709551616"),
    "an id above any model's": (npy(np.full((9, 2), 4096)), "num_experts is 4097"),
    "more choices than experts": (npy(np.zeros((9, 2, 2), int)), "top-2 routing of 1 experts"),
}


def in_archive(content: bytes):
    return lambda path: npz(path, content)


def in_file(content: bytes):
    return lambda path: path.write_bytes(content)


FILES = [
    *(pytest.param("t.npz", *row, id=f"archive: {name}") for name, row in ARCHIVES.items()),
    *(pytest.param("t.npy", in_file(x), (words,), id=f"npy: {name}") for name, (x, words) in HEADERS.items()),
    *(pytest.param("t.npz", in_archive(x), (words,), id=f"npz: {name}") for name, (x, words) in HEADERS.items()),
]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(("name", "make", "words"), FILES)
def test_a_broken_file_is_refused_by_name(tmp_path, monkeypatch, name, make, words):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    refuses(lambda: trace_files.read(tmp_path / name), ValueError, name, *words)
    assert not Path("EVIL").exists()


def columns(**changed):
    return {f"layer{i}": E[:, i] for i in range(3)} | changed


def two_named(name: str) -> pyarrow.Table:
    return pyarrow.table([pyarrow.array(E[:, i]) for i in range(3)], names=["a", name, name])


TABLES = {
    "fractional ids": (columns(layer1=E[:, 1] / 1.0), "column 'layer1' is double, allowed: integers"),
    "truths as ids": (columns(layer1=E[:, 1] > 3), "column 'layer1' is bool"),
    "words as ids": (columns(layer1=[str(e) for e in E[:, 1]]), "column 'layer1' is string"),
    "lists as ids": (columns(layer1=[[int(e)] for e in E[:, 1]]), "column 'layer1' is list"),
    "dates as ids": (columns(layer1=E[:, 1].astype("M8[s]")), "column 'layer1' is timestamp"),
    "words as sequences": (columns(sequence=["a"] * TOKENS), "column 'sequence' is string"),
    "a row without a value": (columns(layer1=[None, *E[1:, 1].tolist()]), "column 'layer1' has 1 rows without a value"),
    "a row without a sequence": (columns(sequence=[None] + [1] * (TOKENS - 1)), "column 'sequence' has 1 rows"),
    "an id beyond 63 bits": (columns(layer1=np.full(TOKENS, 2**64 - 1, np.uint64)), "column 'layer1': not int64"),
    "a negative id": (columns(layer1=E[:, 1].astype(np.int8) - 9), "is not in 0..7"),
    "sequences only": ({"sequence": E[:, 0]}, "two layers"),
    "one layer": ({"layer0": E[:, 0]}, "two layers"),
    "no column": (pyarrow.table({}), "at least one token"),
    "no row": ({"a": E[:0, 0], "b": E[:0, 1]}, "at least one token"),
    "two columns of sequences": (two_named("sequence"), "2 columns are named 'sequence'"),
}


@pytest.mark.parametrize(("table", "words"), TABLES.values(), ids=TABLES)
def test_a_wrong_table_is_refused_by_column(tmp_path, table, words):
    parquet(tmp_path / "t.parquet", table)
    refuses(lambda: trace_files.read(tmp_path / "t.parquet"), ValueError, "t.parquet", words)


@pytest.mark.parametrize("part", [0, 3, 4, 40, -9, -8, -4, -1], ids=lambda part: f"cut at {part}")
def test_a_cut_table_is_refused(tmp_path, part):
    path = parquet(tmp_path / "t.parquet", columns())
    path.write_bytes(path.read_bytes()[:part])
    refuses(lambda: trace_files.read(path), ValueError, "t.parquet", "not a Parquet file")


@pytest.mark.parametrize("name", ["t.npz", "t.parquet"])
def test_a_trace_that_would_take_too_much_memory_is_refused_before(tmp_path, monkeypatch, name):
    """What is read as a whole has a limit, and counts have one."""
    npz(tmp_path / "t.npz", seq_len=np.ones(TOKENS, np.uint8))
    parquet(tmp_path / "t.parquet", columns())
    monkeypatch.setattr(importlib.import_module("repro.exflow.trace_files"), "MOST_BYTES", 1199)
    refuses(lambda: exflow.load_trace(tmp_path / name), ValueError, name, "bytes, allowed: 1,199")


ORDINARY = "allowed: an ordinary file"
PLACES = [
    pytest.param("a.npz", lambda p: p.mkdir(), ValueError, ORDINARY, id="a folder"),
    pytest.param("a.npz", os.mkfifo, ValueError, ORDINARY, id="a pipe"),
    pytest.param("a.npy", lambda p: p.symlink_to("/dev/zero"), ValueError, ORDINARY, id="a link to endless zeros"),
    pytest.param("a.parquet", lambda p: p.symlink_to("/dev/zero"), ValueError, ORDINARY, id="a table of endless zeros"),
    pytest.param("a.npz", lambda p: p.symlink_to("/dev/null"), ValueError, ORDINARY, id="a link to nothing"),
    pytest.param("a.npz", lambda p: p.symlink_to("b.npz"), FileNotFoundError, "no such trace", id="a dangling link"),
    pytest.param("a.npz", lambda p: None, FileNotFoundError, "no such trace", id="a missing file"),
    pytest.param("a.csv", lambda p: p.write_text("1,2"), ValueError, ".npy, .npz, .parquet", id="a table of text"),
    pytest.param("a", lambda p: p.write_bytes(npy(E)), ValueError, "unknown kind of trace ''", id="no ending"),
    pytest.param("a.npy", npz, ValueError, "not a NumPy array", id="an archive named as array"),
    pytest.param("a.npz", lambda p: parquet(p, columns()), ValueError, "not a NumPy archive", id="a table as archive"),
    pytest.param("a" * 300 + ".npz", lambda p: None, OSError, "too long", id="a name that is too long"),
]


@pytest.mark.parametrize(("name", "make", "error", "words"), PLACES)
def test_what_is_no_file_of_a_trace_is_refused(tmp_path, name, make, error, words):
    make(tmp_path / name)
    refuses(lambda: exflow.load_trace(tmp_path / name), error, name, words)


READ = {
    **{
        f"{dtype} ids": (f"npz {dtype}", E.astype(dtype)) for dtype in ("|i1", "<u2", "<i4", ">i4", ">i8", "<u8", ">u8")
    },
    "ids in Fortran's order": ("npz order", np.asfortranarray(E.astype(np.int32))),
    "choices of one expert": ("npz k", E[:, :, None]),
    "a header of version 2": ("npz v2", described(version=2)),
    "a header without padding": ("npz bare", described()),
    "mapped big-endian ids": ("npy >i4", E.astype(">i4")),
    "mapped ids in Fortran's order": ("npy order", np.asfortranarray(E)),
    "mapped unsigned ids": ("npy u8", E.astype(np.uint64)),
}


@pytest.mark.parametrize(("kind", "content"), READ.values(), ids=READ)
def test_what_has_a_clear_meaning_is_read(tmp_path, kind, content):
    path = tmp_path / f"t.{kind[:3]}"
    if path.suffix == ".npz":
        npz(path, content)
    else:
        path.write_bytes(npy(content))
    found = transitions(exflow.load_trace(path))
    np.testing.assert_array_equal(found, transitions(exflow.Trace(E.astype(int), 8)))


OTHERS = {
    "compressed": (dict(compression=zipfile.ZIP_DEFLATED), []),
    "compressed by bzip2": (dict(compression=zipfile.ZIP_BZIP2), []),
    "compressed by LZMA": (dict(compression=zipfile.ZIP_LZMA), []),
    "beside a text": ({}, [("README", b"of whatever"), ("weights", b"no array")]),
    "beside a pickle that nobody reads": ({}, [("names.npy", pickled((3,)))]),
    "unsigned lengths": ({}, [("seq_len.npy", np.array([20, 40], ">u8"))]),
    "lengths of a byte": ({}, [("seq_len.npy", np.array([20, 40], np.uint8))]),
    "an empty sequence": ({}, [("seq_len.npy", np.array([20, 0, 40]))]),
    "experts as an unsigned number": ({}, [("num_experts.npy", np.array(8, ">u8"))]),
    "whole weights": ({}, [("weights.npy", np.ones(E.shape, int))]),
    "weights that are no numbers": ({}, [("weights.npy", np.full(E.shape, np.nan, np.float16))]),
}


@pytest.mark.parametrize(("how", "members"), OTHERS.values(), ids=OTHERS)
def test_archives_that_are_read(tmp_path, monkeypatch, how, members):
    monkeypatch.chdir(tmp_path)
    trace = exflow.load_trace(archive(tmp_path / "t.npz", ("experts.npy", E), *members, **how))
    np.testing.assert_array_equal(trace.experts, E)
    if any(name == "seq_len.npy" for name, _ in members):
        assert np.unique(trace.sequences, return_counts=True)[1].tolist() == [20, 40]
    assert trace.num_experts == 8 and not Path("EVIL").exists()


def test_tables_of_mixed_integers_are_read(tmp_path):
    path = parquet(tmp_path / "t.parquet", columns(layer1=E[:, 1].astype(np.uint64), layer2=E[:, 2].astype(np.int32)))
    np.testing.assert_array_equal(exflow.load_trace(path).experts, E)


GOOD = np.ones((2, 8, 8))
PLACED = exflow.Placement(np.tile(np.arange(8) // 2, (3, 1)), 4, 4, "by hand")
PAIRS = exflow.Trace(np.stack([E, (E + 1) % 8], axis=2).astype(int), 8)


def changed_after(value: int) -> np.ndarray:
    trace = exflow.Trace(E.copy(), 8)
    trace.experts[7, 1] = value
    return transitions(trace)


CALLS = {
    "more experts than the kernels count": (lambda: exflow.Trace(E, 4097), "num_experts is 4097, allowed: 1 to 4096"),
    "more counts than memory": (
        lambda: transitions(exflow.Trace(np.zeros((1, 4096), int), 4096)),
        "4096 layers of 4096 experts have 68,702,699,520 transition counts, allowed: 134,217,728",
    ),
    "an id that changed after it was checked": (lambda: changed_after(200), "row 7, layer 1: expert 200"),
    "bounds of counts that are no squares": (lambda: exflow.lower_bound(np.ones((2, 8, 4)), 2), "(2, 8, 4)"),
    "bounds of counts in two dimensions": (lambda: exflow.lower_bound(np.ones((8, 8)), 2), "(8, 8)"),
    "bounds of counts that are no numbers": (lambda: exflow.lower_bound(GOOD * math.nan, 4), "must be finite"),
    "bounds of infinite counts": (lambda: exflow.lower_bound(GOOD * math.inf, 4), "must be finite"),
    "bounds of negative counts": (lambda: exflow.lower_bound(-GOOD, 4), "not negative"),
    "bounds on no GPU": (lambda: exflow.lower_bound(GOOD, 0), "by 0 GPUs"),
    "bounds in a time that is no number": (lambda: exflow.lower_bound(GOOD, 4, math.nan), "time_limit_s is nan"),
    "a limit that is no number": (lambda: exflow.place(GOOD, 4, time_limit_s=math.nan), "time_limit_s is nan"),
    "a limit below zero": (lambda: exflow.place(GOOD, 4, time_limit_s=-1.0), "time_limit_s is -1"),
    "placing on 10^9 GPUs": (lambda: exflow.place(GOOD, 10**9), "by 1000000000 GPUs"),
    "placing on -8 GPUs": (lambda: exflow.place(GOOD, -8), "gpus is -8"),
    "a cost beyond single precision": (lambda: exflow.place(GOOD, 4, costs=[1e300]), "costs are (1e+300,)"),
    "a cost of nothing": (lambda: exflow.place(GOOD, 4, costs=[1e-300]), "must be positive: 1e-09 to 1e+09"),
    "infinite costs of whole tokens": (
        lambda: exflow.place_for_fanout(PAIRS, PLACED, costs=(1.0, math.inf)),
        "costs are (1.0, inf)",
    ),
    "a limit on whole tokens that is no number": (
        lambda: exflow.place_for_fanout(PAIRS, PLACED, time_limit_s=math.nan),
        "time_limit_s is nan",
    ),
    "an integer program without end": (
        lambda: paper.program(np.ones((12, 512, 512)), 2),
        "6,291,456 rows, allowed: 6,000,000",
    ),
    "a placement on a GPU that there is not": (
        lambda: exflow.Placement(np.array([[0, 9]]), 4, 4, "by hand"),
        "gpu is 0 to 9, allowed: 0 to 3",
    ),
    "a placement on a negative GPU": (lambda: exflow.Placement(np.array([[0, -9]]), 4, 4, "by hand"), "gpu is -9 to 0"),
    "a placement of fractions": (lambda: exflow.Placement(np.ones((2, 4)), 4, 4, "by hand"), "gpu is float64 (2, 4)"),
    "a placement of one layer": (lambda: exflow.Placement(np.arange(4), 4, 4, "by hand"), "gpu is int64 (4,)"),
    "a placement of another trace": (
        lambda: exflow.evaluate(PLACED, np.ones((3, 8, 8))),
        "the placement has 3 layers of 8 experts, the routing has 4 of 8",
    ),
    "a slot of expert 10^12": (
        lambda: exflow.Replicas(np.array([[0, 10**12]]), 2, 2),
        "expert 1000000000000 is in a slot",
    ),
    "a slot of a negative expert": (lambda: exflow.Replicas(np.array([[0, -1]]), 2, 2), "negative"),
    "an expert in no slot": (lambda: exflow.Replicas(np.array([[0, 0, 2, 2]]), 2, 2), "experts [1] are in no slot"),
    "slots of fractions": (lambda: exflow.Replicas(np.ones((1, 2)), 2, 2), "slots are float64 (1, 2)"),
    "no slots": (lambda: exflow.Replicas(np.ones((1, 0), int), 2, 2), "slots are int64 (1, 0)"),
    "slots that GPUs cannot share": (lambda: exflow.Replicas(np.array([[0, 1, 2]]), 2, 2), "by 2 GPUs"),
    "more copies than GPUs can hold": (
        lambda: exflow.place_replicas(PLACED, exflow.Trace(E, 8), 10**9),
        "1000000000 extra slots per GPU, allowed: 0 to 6",
    ),
    "a load limit that is no number": (lambda: exflow.place(GOOD, 4, max_load=math.nan), "max_load is nan"),
    "an infinite load limit": (lambda: exflow.place(GOOD, 4, max_load=math.inf), "max_load is inf"),
}


@pytest.mark.parametrize(("call", "words"), CALLS.values(), ids=CALLS)
def test_wrong_calls_are_refused(call, words):
    refuses(call, ValueError, words)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory):
    return npz(tmp_path_factory.mktemp("traces") / "t.npz")


OPTIONS = {
    "--levels weighted=2": "--levels weighted=2: weighted_hops is of something else in the result",
    "--levels intra=2,rack=2": "intra_hops is of something else",
    "--levels inter=2": "inter_hops is of something else",
    "--levels node=2,copies_inter=2": "copies_inter_hops is of something else",
    "--levels node=2,node=2": "distinct names",
    "--levels =2": "'=2' is not NAME=SIZE",
    "--levels node=": "'node=' is not NAME=SIZE",
    "--levels node": "'node' is not NAME=SIZE",
    "--levels ,": "'' is not NAME=SIZE",
    "--levels node=0": "size is 0",
    "--levels node=-2": "'node=-2' is not NAME=SIZE",
    "--levels node=2.0": "'node=2.0' is not NAME=SIZE",
    "--levels node=1e3": "'node=1e3' is not NAME=SIZE",
    "--levels node=²": "is not NAME=SIZE",
    "--levels n\x1b[31m=2": "is not NAME=SIZE",
    "--levels node=3": "8 experts per layer cannot be shared evenly by 3 GPUs",
    f"--levels node={10**40}": f"evenly by {10**40} GPUs",
    f"--levels node=1{'0' * 5000}": "limit",
    "--levels " + ",".join(f"l{i}=1" for i in range(9999)): "the machine has 9999 levels, allowed: at most 16",
    "--gpus 0": "--gpus",
    "--gpus -4": "--gpus",
    "--gpus 3": "cannot be shared evenly by 3 GPUs",
    "--gpus 16": "cannot be shared evenly by 16 GPUs",
    "--gpus 1000000000": "cannot be shared evenly by 1000000000 GPUs",
    "--gpus 4 --gpus-per-node 3": "--gpus-per-node is 3",
    "--gpus 4 --gpus-per-node 1000000000": "--gpus-per-node is 1000000000",
    "--gpus 4 --costs nan": "must be positive",
    "--gpus 4 --costs inf": "must be positive",
    "--gpus 4 --costs -1": "must be positive",
    "--gpus 4 --costs 0": "must be positive",
    "--gpus 4 --costs 1e300": "1e-09 to 1e+09",
    "--gpus 4 --gpus-per-node 2 --costs 2,1": "not decreasing",
    "--gpus 4 --gpus-per-node 2 --costs 1,,2": "--costs 1,,2",
    "--gpus 4 --gpus-per-node 2 --costs 1": "one per level",
    "--gpus 4 --time-limit nan": "--time-limit",
    "--gpus 4 --time-limit inf": "--time-limit is inf",
    "--gpus 4 --time-limit -1": "--time-limit",
    "--gpus 4 --time-limit 0": "--time-limit",
    "--gpus 4 --time-limit 1e999": "--time-limit is inf",
    "--gpus 4 --max-load nan": "--max-load is nan",
    "--gpus 4 --max-load inf": "--max-load is inf",
    "--gpus 4 --max-load -1": "--max-load is -1.0",
    "--gpus 4 --rounds -1": "--rounds",
    "--gpus 4 --seed -1": "--seed",
    "--gpus 4 --seed x": "--seed",
    "--gpus 4 --top-k 0": "--top-k",
    "--gpus 4 --top-k 1000000000": "top-1000000000 asked of a top-1 trace",
    "--gpus 4 --num-experts 0": "--num-experts",
    "--gpus 4 --num-experts 7": "expert 7 is not in 0..6",
    "--gpus 4 --num-experts 1000000000": "num_experts is 1000000000, allowed: 1 to 4096",
    "--gpus 4 --extra-slots -1": "--extra-slots",
    "--gpus 4 --extra-slots 1000000000": "--extra-slots is 1000000000, allowed: 0 to 6",
    "--gpus 4 --format sglang --dense-layers 1000000000": "--dense-layers",
}


def invoke(path: Path, options: str):
    return CliRunner().invoke(cli.app, ["place", str(path), *options.split()])


@pytest.mark.parametrize(("options", "words"), OPTIONS.items(), ids=[options[:60] for options in OPTIONS])
def test_wrong_options_are_refused(trace_file, options, words):
    found = invoke(trace_file, options)
    said = " ".join(found.output.replace("│", " ").split())
    assert found.exit_code == 2 and words in said, said


LEGAL = {
    "a name in brackets": "--levels [/]=4",
    "a name of another script": "--levels Knötchen=2,架=2",
    "levels of one": "--levels a=1,b=4,c=1",
    "the lowest cost": "--gpus 4 --costs 1e-9",
    "the highest cost": "--gpus 4 --gpus-per-node 2 --costs 1e-9,1e9",
    "a long time limit that is not needed": "--gpus 4 --time-limit 1e99",
    "an endless number of rounds that is not needed": f"--gpus 4 --rounds {10**30}",
    "a seed of 100 digits": f"--gpus 4 --rounds 1 --seed {10**99}",
    "a seed beyond HiGHS's": f"--gpus 4 --method exflow --seed {2**31}",
    "one GPU": "--gpus 1",
    "a GPU for each expert": "--gpus 8",
    "a high load limit": "--gpus 4 --max-load 1e300",
}


@pytest.mark.parametrize("options", LEGAL.values(), ids=LEGAL)
@pytest.mark.parametrize("form", ["--json", ""])
def test_odd_but_legal_options(trace_file, options, form):
    found = invoke(trace_file, f"{options} {form}")
    assert found.exit_code == 0, found.output
    if form:
        result = json.loads(found.stdout, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
        assert result["bound_share"] == 1 and result["bound"] <= result["crossing_fraction"] + 1e-9


def test_one_expert_is_placed(tmp_path):
    found = invoke(npz(tmp_path / "t.npz", np.zeros((3, 2), int)), "--gpus 1 --json")
    assert json.loads(found.stdout)["hops_per_token"] == 0


REAL = {
    "lengths that wrap around": ("t.npz", ARCHIVES["lengths whose sum wraps around to the tokens"][0], "`seq_len`"),
    "13 GiB from a few bytes": ("t.npz", ARCHIVES["13 GiB from a few bytes"][0], "13,958,643,7"),
    "a pickle": ("t.npz", in_archive(pickled(E.shape)), "t.npz"),
    "a pipe": ("t.npy", os.mkfifo, ORDINARY),
}


@pytest.mark.parametrize(("name", "make", "words"), REAL.values(), ids=REAL)
def test_through_the_command(tmp_path, name, make, words):
    make(tmp_path / name)
    command_refuses(["place", name, "--gpus", 4], tmp_path, name, words)
    assert not (tmp_path / "EVIL").exists()


@pytest.mark.parametrize("looks", range(5))
def test_a_bound_that_is_stopped_holds(looks):
    """After so many looks at the clock: spectra of two pairs of layers, then their b-matchings."""
    counts = np.random.default_rng(1).gamma(0.2, 20.0, (2, 64, 64))
    left = iter([math.inf] * looks + [0.0] * 9)
    stopped, share = bound.lower_bound_within(counts, 8, clock=lambda: next(left))
    assert 0 <= stopped <= exflow.lower_bound(counts, 8) and share == max(0, looks - 2) / 2


def test_a_matching_that_is_stopped_halfway_is_bounded():
    pairs = np.random.default_rng(2).gamma(0.2, 20.0, (256, 256))
    left = iter([math.inf] + [0.0] * 9)
    stopped, done = bound.b_matching_within(pairs, 32, lambda: next(left))
    heaviest = np.sort(pairs, axis=1)[:, -32:].sum()
    assert not done and bound.b_matching(pairs, 32) < stopped <= heaviest


def test_evil_is_evil(tmp_path, monkeypatch):
    """The pickles of these tests would run."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Evil()))
    assert Path("EVIL").exists()
