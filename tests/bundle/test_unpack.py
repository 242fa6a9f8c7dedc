"""Archives that a bundle cannot be are refused, in words, and leave nothing behind."""

import hashlib
import io
import os
import random
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

from repro import cli
from repro.bundle import BundleError, unpack
from repro.bundle.archive import Entry, manifest, write

TOP = "repro-1"
GOOD = {
    "README.md": Entry(b"read me\n"),
    "run": Entry(b"#!/bin/sh\n", "program"),
    "data/trace.npy": Entry(bytes(700)),
    "workflow": Entry(b"data", "link"),
    "data/again": Entry(b"../README.md", "link"),
    f"records/{'long-' * 30}\u00e9.json": Entry(b"{}\n"),
}


@pytest.fixture
def good(tmp_path) -> Path:
    write(tmp_path / "good.tar", TOP, GOOD, when=1_700_000_000)
    return tmp_path / "good.tar"


def test_a_bundle_comes_out_as_it_went_in(good, tmp_path):
    found = unpack(good, tmp_path / "into")
    folder = tmp_path / "into" / TOP
    assert (found.folder, found.files) == (folder, len(GOOD) + 1)
    for path, entry in GOOD.items():
        if entry.kind == "link":
            assert (folder / path).readlink() == Path(entry.contents.decode())
        else:
            assert (folder / path).read_bytes() == entry.contents
            assert (folder / path).stat().st_mtime == 1_700_000_000
    assert os.access(folder / "run", os.X_OK) and not os.access(folder / "README.md", os.X_OK)
    assert (folder / "workflow/trace.npy").exists() and (folder / "data/again").read_bytes() == b"read me\n"
    assert [path.name for path in (tmp_path / "into").iterdir()] == [TOP]


def test_checking_writes_nothing(good, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert unpack(good, None).folder == Path(TOP)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_there_stays(good, tmp_path):
    (tmp_path / TOP).symlink_to("/nowhere")
    with pytest.raises(FileExistsError, match="is there already; allowed: a folder without repro-1"):
        unpack(good, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.tar", TOP]


@dataclass
class Hostile:
    """An archive: members with their contents, and a manifest that fits them unless another is given."""

    said: str  # in the message
    members: list[tuple[tarfile.TarInfo, bytes]]
    manifest: bytes | None = None
    links: dict[str, str] = field(default_factory=dict)  # in the manifest
    dialect: int = tarfile.GNU_FORMAT

    def write(self, path: Path) -> None:
        files = {info.name.removeprefix(f"{TOP}/"): Entry(data) for info, data in self.members if info.isreg()}
        links = {path: Entry(target.encode(), "link") for path, target in self.links.items()}
        text = manifest(files | links) if self.manifest is None else self.manifest
        with tarfile.open(path, "w", format=self.dialect) as tar:
            for info, data in [(member("SHA256SUMS", size=len(text)), text), *self.members]:
                tar.addfile(info, io.BytesIO(data))


def member(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644, top: str = TOP):
    info = tarfile.TarInfo(f"{top}/{name}" if top else name)
    info.size, info.type, info.linkname, info.mode = size, kind, link, mode
    return info


def a_file(name: str, top: str = TOP, mode: int = 0o644, data: bytes = b"owned") -> tuple[tarfile.TarInfo, bytes]:
    return member(name, len(data), mode=mode, top=top), data


def a_link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, kind=kind, link=target, mode=0o777), b""


def linked(said: str, name: str, target: str, *others: tuple[tarfile.TarInfo, bytes]) -> Hostile:
    return Hostile(said, [*others, a_link(name, target)], links={name: target})


def of_kind(said: str, kind: bytes) -> Hostile:
    return Hostile(said, [(member("odd", kind=kind), b"")])


def extended(entry: tuple[tarfile.TarInfo, bytes], headers: dict[str, str]) -> tuple[tarfile.TarInfo, bytes]:
    entry[0].pax_headers = headers
    return entry


def at(when: int, entry: tuple[tarfile.TarInfo, bytes]) -> tuple[tarfile.TarInfo, bytes]:
    entry[0].mtime = when
    return entry


PAX = tarfile.PAX_FORMAT
HOSTILE = {
    "a step upwards": Hostile("'repro-1/../x': found a step to another folder", [a_file("../x")]),
    "a step upwards inside": Hostile("found a step to another folder", [a_file("a/../../x")]),
    "a name of many folders": Hostile("bytes and 34 steps", [a_file("a/" * 32 + "x")]),
    "a long name": Hostile("bytes and 7 steps", [a_file("a" * 200 + ("/" + "a" * 200) * 5)], dialect=PAX),
    "an absolute name": Hostile("'/etc/cron.d/x': found an absolute name", [a_file("/etc/cron.d/x", top="")]),
    "another folder": Hostile("'home/x': found a name outside the bundle's folder", [a_file("home/x", top="")]),
    "a name of the bundle's folder": Hostile("found a name outside the bundle's folder", [a_file(TOP, top="")]),
    "an empty step": Hostile("found an empty step", [a_file("a//x")]),
    "a backslash": Hostile("a backslash or a colon", [a_file("..\\x")]),
    "a drive": Hostile("a backslash or a colon", [a_file("C:x")]),
    "a line break": Hostile("not printable", [a_file("a\nb")]),
    "a control character": Hostile("not printable", [a_file("a\x1b[31m")]),
    "no UTF-8": Hostile("not printable", [a_file("a\udcff")], manifest=b""),
    "a link out": linked("found a link to '../../etc'; allowed: a relative link", "x", "../../etc"),
    "an absolute link": linked("found a link to '/etc/passwd'", "x", "/etc/passwd"),
    "a link out through a folder": linked("found a link to 'a/../../x'", "x", "a/../../x", a_file("a/b")),
    "a link to the bundle's folder": linked("found a link to '.'", "x", "."),
    "a link to nothing": linked("found a link to 'gone'", "x", "gone"),
    "a link to itself": linked("found a link to 'x'", "x", "x"),
    "a link to a link": Hostile(
        "found a link to 'x'",
        [a_file("f"), a_link("x", "f"), a_link("y", "x")],
        links={"x": "f", "y": "x"},
    ),
    "a file through a link": Hostile(
        "'x': found members below a file or link", [a_file("d/f"), a_link("x", "d"), a_file("x/f")], links={"x": "d"}
    ),
    "a member below a link of another case": Hostile(
        "'X': found members below a file or link", [a_file("d/f"), a_link("X", "d"), a_file("x/f")], links={"X": "d"}
    ),
    "a file below a file": Hostile("'x': found members below a file or link", [a_file("x"), a_file("x/f")]),
    "a hard link out": Hostile("found a hard link", [a_link("x", "/etc/passwd", tarfile.LNKTYPE)]),
    "a hard link": Hostile("found a hard link", [a_file("f"), a_link("x", f"{TOP}/f", tarfile.LNKTYPE)]),
    "a character device": of_kind("found a character device", tarfile.CHRTYPE),
    "a block device": of_kind("found a block device", tarfile.BLKTYPE),
    "a named pipe": of_kind("found a named pipe", tarfile.FIFOTYPE),
    "a folder": of_kind("found an entry for a folder", tarfile.DIRTYPE),
    "a contiguous file": of_kind("found an entry of type b'7'", tarfile.CONTTYPE),
    "a long name of GNU's kind": Hostile("found an entry of type b'L'", [a_file("x" * 300)]),
    "a long link of GNU's kind": linked("found an entry of type b'K'", "x", "f" * 300),
    "a long way upwards": Hostile("found a step to another folder", [a_file("../" * 60 + "x")], dialect=PAX),
    "a long absolute name": Hostile("found an absolute name", [a_file("/etc/" + "x" * 200, top="")], dialect=PAX),
    "a long link in an extended header": Hostile(
        "linkpath=ffff", [a_link("x", "f" * 297)], manifest=b"", dialect=PAX
    ),
    "more in an extended header": Hostile(
        "'repro-1/SHA256SUMS': found after it an extended header b'22 GNU.sparse.major=1",
        [extended(a_file("f"), {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})],
        dialect=PAX,
    ),
    "a size in an extended header": Hostile(
        "found after it an extended header b'15 size=999999", [extended(a_file("f"), {"size": "999999"})], dialect=PAX
    ),
    "a duplicate": Hostile("found a second member of this name", [a_file("f", data=b"1"), a_file("f")]),
    "a duplicate but for case": Hostile("found a second member of this name", [a_file("README"), a_file("readme")]),
    "a duplicate in Unicode": Hostile("found a second member", [a_file("\u00e9"), a_file("e\u0301")]),
    "two manifests": Hostile("'repro-1/SHA256SUMS': found a second member of this name", [a_file("SHA256SUMS")]),
    "setuid": Hostile("found mode 4755; allowed: 644 or 755", [a_file("f", mode=0o4755)]),
    "a time before all": Hostile("found the time -5; allowed: 0 to", [at(-5, a_file("f"))]),
    "a time after all": Hostile("found the time 1152921504606846976", [at(1 << 60, a_file("f"))]),
    "another checksum": Hostile(
        f"'f': found SHA-256 {hashlib.sha256(b'owned').hexdigest()}; allowed: {'0' * 64}",
        [a_file("f")],
        manifest=f"{'0' * 64}  f\n".encode(),
    ),
    "not in the manifest": Hostile("'f': found a member that is not in the manifest", [a_file("f")], manifest=b""),
    "not in the archive": Hostile("'g': found no such member", [], manifest=f"{'0' * 64}  g\n".encode()),
    "another link": Hostile(
        "found a link -> g; allowed: -> f",
        [a_file("f"), a_file("g"), a_link("x", "g")],
        links={"x": "f"},
    ),
    "a link for a file": Hostile("'x': found a link", [a_file("f"), a_link("x", "f")], manifest=(
        manifest({"f": Entry(b"owned"), "x": Entry(b"owned")})
    )),
    "a manifest without hashes": Hostile("'SHA256SUMS': found line 1: 'f'", [a_file("f")], manifest=b"f\n"),
    "a manifest that is no text": Hostile("'SHA256SUMS': found", [a_file("f")], manifest=b"\xff\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused(name, tmp_path):
    archive, into = tmp_path / "bad.tar", tmp_path / "into"
    HOSTILE[name].write(archive)
    with pytest.raises(BundleError) as refused:
        unpack(archive, into)
    assert HOSTILE[name].said in str(refused.value)
    assert str(refused.value).startswith(f"{archive}: ") and "; allowed: " in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def test_the_table_differs_from_a_good_archive_in_one_thing(tmp_path):
    """Else each could be refused for a fault that all of them share."""
    sound = Hostile("", [a_file("f"), a_link("x", "f"), a_file("p", mode=0o755)], links={"x": "f"})
    sound.write(tmp_path / "good.tar")
    assert unpack(tmp_path / "good.tar", tmp_path).files == 4


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "a long name without a member": ("found no member", lambda whole: whole[: whole.index(b"././@PaxHeader") + 1024] + bytes(1024)),
    "empty": ("found no member", lambda whole: b""),
    "zeros": ("found no member", lambda whole: bytes(len(whole))),
    "another kind": ("found no tar header at byte 0", lambda whole: b"PK\x03\x04" + whole),
    "cut in a member": ("bytes, 188 are left", lambda whole: whole[:700]),
    "cut in a header": ("found no tar header", lambda whole: whole[: whole.rindex(b"ustar")]),
    "cut before its end": ("found the end of the file after this member", lambda whole: whole[: whole.rindex(b"#!") + 512]),
    "longer": ("found more bytes after the end of the archive", lambda whole: whole + whole),
    "a negative size": ("found a size of -512 bytes", lambda whole: header(whole, -512)),
    "a size of less than nothing": ("found a size of -1 bytes", lambda whole: header(whole, -1)),
    "a huge size": ("found a size of 1152921504606846976 bytes", lambda whole: header(whole, 1 << 60)),
}  # fmt: skip


def header(whole: bytes, size: int) -> bytes:
    """The same archive; its first header says another size, as GNU tar writes those of over eight digits."""
    lead = b"\xff" if size < 0 else b"\x80"
    block = bytearray(whole[:512])
    block[124:136] = lead + (size % 256**11).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + whole[512:]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_archive_is_refused(name, good, tmp_path):
    said, damage = DAMAGED[name]
    good.write_bytes(damage(good.read_bytes()))
    with pytest.raises(BundleError) as refused:
        unpack(good, tmp_path)
    assert said in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["good.tar"]


def test_no_changed_byte_changes_what_is_unpacked(good, tmp_path):
    whole, chance = good.read_bytes(), random.Random(3)
    unpack(good, tmp_path / "good")
    expected, refused = contents(tmp_path / "good"), 0
    for number in range(300):
        place = chance.randrange(len(whole))
        good.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :])
        into = tmp_path / str(number)
        try:
            unpack(good, into)
        except BundleError:
            refused += 1
            assert not into.exists()
        else:
            assert contents(into) == expected, place
    assert refused > 100


def contents(folder: Path) -> Iterable[tuple[str, bytes]]:
    return [(path.relative_to(folder).as_posix(), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file()]  # fmt: skip


def test_a_pipe_is_no_archive(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BundleError, match="found no ordinary file"):
        unpack(tmp_path / "pipe", None)


def test_the_command_says_what_is_wrong(tmp_path):
    HOSTILE["a step upwards"].write(tmp_path / "bad.tar")
    found = CliRunner().invoke(cli.app, ["unbundle", str(tmp_path / "bad.tar"), "--into", str(tmp_path)])
    assert found.exit_code == 2
    assert "'repro-1/../x': found a step to another folder" in found.output and "Traceback" not in found.output
