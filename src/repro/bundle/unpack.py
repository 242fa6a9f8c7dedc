"""Check a bundle that comes from anywhere, and unpack it whole or not at all.

Every header is read here and must be of the few kinds that `archive.write` makes: nothing is left to what a library
for all of tar's dialects makes of an odd one. No member is written before all names, links and checksums are right.
"""

import hashlib
import os
import posixpath
import re
import stat
import tarfile
import tempfile
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from repro.bundle.archive import MANIFEST, MODES, BundleError, listed

_BLOCK = tarfile.BLOCKSIZE
_CHUNK = 1 << 20
_MANIFEST_MOST = 64 << 20
_END_OF_TIME = 1 << 33  # as ustar's eleven octal digits
_LONGEST, _DEEPEST = 1_000, 32  # a name, in bytes and steps: each of its folders is compared with all others
_NAMES = f"a path below one folder, of printable characters, without steps (. ..), backslash and colon, of {_LONGEST} bytes and {_DEEPEST} steps at most"
_KINDS = "ordinary files and symbolic links"
_ODD = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.DIRTYPE: "an entry for a folder",
}


class Unpacked(NamedTuple):
    """What a bundle holds: its folder (unpacked, or as the archive names it), files and bytes."""

    folder: Path
    files: int
    nbytes: int


@dataclass(frozen=True)
class _Member:
    path: str  # below the bundle's folder
    info: tarfile.TarInfo
    start: int  # of its contents in the archive


def unpack(archive: Path, into: Path | None) -> Unpacked:
    """Check every member of a bundle, and unpack it as a new folder below `into`; with None, only check it.

    BundleError for whatever a bundle of ours cannot hold, and for contents that differ from the manifest; OSError where
    the archive cannot be read or nothing can be written. Then nothing is left of what was unpacked.
    """
    with open(archive, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BundleError(archive, "", "no ordinary file", "a tar archive that repro bundle has written")
        top, members = _examine(archive, file)
        _compare(archive, file, top, members)
        if into is not None:
            _write(file, into / top, members)
    folder = Path(top) if into is None else into / top
    return Unpacked(folder, len(members), sum(member.info.size for member in members.values() if member.info.isreg()))


def _examine(archive: Path, file: IO[bytes]) -> tuple[str, dict[str, _Member]]:
    """The bundle's folder, and its members by path. BundleError for a name, kind, mode or link that none may have."""
    top, members, seen = "", {}, set()
    for info, start in _headers(archive, file):
        if info.type not in (tarfile.REGTYPE, tarfile.SYMTYPE):
            raise BundleError(archive, info.name, _ODD.get(info.type, f"an entry of type {info.type!r}"), _KINDS)
        if fault := _name_fault(info.name):
            raise BundleError(archive, info.name, fault, _NAMES)
        folder, _, path = info.name.partition("/")
        top = top or folder
        if folder != top or not path:
            raise BundleError(archive, info.name, "a name outside the bundle's folder", f"{top}/...")
        same = _alike(path)
        if same in seen:
            raise BundleError(archive, info.name, "a second member of this name", "one; upper and lower case are alike")
        modes = [MODES["link"]] if info.issym() else [MODES["file"], MODES["program"]]
        if info.mode not in modes:
            raise BundleError(archive, info.name, f"mode {info.mode:o}", " or ".join(f"{mode:o}" for mode in modes))
        if not 0 <= info.mtime < _END_OF_TIME:
            raise BundleError(archive, info.name, f"the time {info.mtime}", f"0 to {_END_OF_TIME} seconds")
        seen.add(same)
        members[path] = _Member(path, info, start)
    _check_places(archive, members)
    return top, members


def _headers(archive: Path, file: IO[bytes]) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Each header with the place of its contents. BundleError for an archive that is cut or damaged, or goes on after
    its end."""
    whole = "a whole, uncompressed tar archive, as repro bundle writes"
    size, place, last, long = os.fstat(file.fileno()).st_size, 0, "", ""
    while any(block := _read(file, place, _BLOCK)):
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError) as error:
            raise BundleError(archive, last, f"no tar header at byte {place} ({error})", whole) from error
        place += _BLOCK
        holds = info.type in (tarfile.REGTYPE, tarfile.XHDTYPE)
        end = place + -(-info.size // _BLOCK) * _BLOCK if holds else place
        if info.size < 0 or end > size:
            raise BundleError(archive, info.name, f"a size of {info.size} bytes, {size - place} are left", whole)
        if info.type == tarfile.XHDTYPE and not long:
            long = _long_name(archive, last, _read(file, place, min(info.size, _BLOCK * 16)))
        else:
            info.name = long or info.name
            yield info, place
            last, long = info.name, ""
        place = end
    if long or not last:
        raise BundleError(archive, long, "no member", whole)
    if size < place + 2 * _BLOCK:
        raise BundleError(archive, last, "the end of the file after this member", whole)
    file.seek(place)
    while rest := file.read(_CHUNK):
        if any(rest):
            raise BundleError(archive, last, "more bytes after the end of the archive", whole)


def _long_name(archive: Path, last: str, header: bytes) -> str:
    """The name in the extended header of a member whose name has over 100 bytes or is not ASCII, the only thing that one may hold."""
    found = re.fullmatch(rb"(\d{1,4}) path=([^\n]+)\n", header)
    with suppress(UnicodeDecodeError):
        if found and int(found[1]) == len(header):
            return found[2].decode()
    raise BundleError(archive, last, f"after it an extended header {header[:80]!r}", "one with a long name alone")


def _read(file: IO[bytes], place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _name_fault(name: str) -> str:
    """What is wrong with a member's name; empty for one that leads nowhere else on any system."""
    if name.startswith("/"):
        return "an absolute name"
    if any(step in (".", "..") for step in name.split("/")):
        return "a step to another folder"
    if "" in name.split("/"):
        return "an empty step"
    length, steps = len(os.fsencode(name)), name.count("/") + 1
    if length > _LONGEST or steps > _DEEPEST:
        return f"a name of {length} bytes and {steps} steps"
    if not name.isprintable() or set(name) & set("\\:"):
        return "a character that is not printable, a backslash or a colon"
    return ""


def _alike(path: str) -> str:
    """The same for names that some file system takes for one."""
    return unicodedata.normalize("NFC", path).casefold()


def _check_places(archive: Path, members: dict[str, _Member]) -> None:
    """No member stands below a file or link, and every link names a member, or a folder of members, of the bundle."""
    folders = {str(folder) for path in members for folder in Path(path).parents}
    alike = set(map(_alike, folders))
    for path in sorted(path for path in members if _alike(path) in alike):
        raise BundleError(archive, path, "members below a file or link", "members below folders")
    known = folders | {path for path, member in members.items() if not member.info.issym()}
    for path, member in members.items():
        if not member.info.issym():
            continue
        target = member.info.linkname
        reached = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if target.startswith("/") or target != posixpath.normpath(target) or reached not in known - {"."}:
            allowed = "a relative link to a file or folder of the bundle, and to no link"
            raise BundleError(archive, path, f"a link to {target!r}", allowed)


def _compare(archive: Path, file: IO[bytes], top: str, members: dict[str, _Member]) -> None:
    """BundleError unless the manifest names exactly the members, with their checksums and links."""
    said = _manifest(archive, file, members)
    found = members.keys() - {MANIFEST}
    for path in sorted(found - said.keys()):
        raise BundleError(archive, path, "a member that is not in the manifest", f"those of {top}/{MANIFEST}")
    for path in sorted(said.keys() - found):
        raise BundleError(archive, path, "no such member", f"every one of {top}/{MANIFEST}")
    for path, expected in said.items():
        member = members[path]
        is_link = member.info.issym()
        what = f"-> {member.info.linkname}" if is_link else _digest(file, member)
        if what != expected:
            kind = "a link" if is_link else "SHA-256"
            raise BundleError(archive, path, f"{kind} {what}", f"{expected}, as {MANIFEST} says")


def _manifest(archive: Path, file: IO[bytes], members: dict[str, _Member]) -> dict[str, str]:
    member = members.get(MANIFEST)
    if member is None or member.info.issym() or member.info.size > _MANIFEST_MOST:
        raise BundleError(archive, MANIFEST, "no such file, or one of over 64 MiB", "a manifest of all members")
    try:
        return listed(_read(file, member.start, member.info.size).decode())
    except ValueError as error:
        raise BundleError(archive, MANIFEST, str(error), "`SHA256  PATH` or `# link PATH -> TARGET`") from error


def _chunks(file: IO[bytes], member: _Member) -> Iterator[bytes]:
    file.seek(member.start)
    left = member.info.size
    while left > 0:
        chunk = file.read(min(left, _CHUNK))
        if not chunk:
            raise OSError(f"{member.path}: the archive has become shorter")
        left -= len(chunk)
        yield chunk


def _digest(file: IO[bytes], member: _Member) -> str:
    digest = hashlib.sha256()
    for chunk in _chunks(file, member):
        digest.update(chunk)
    return digest.hexdigest()


def _write(file: IO[bytes], folder: Path, members: dict[str, _Member]) -> None:
    """Write the members to a new folder beside `folder`, then give it that name. FileExistsError where it is taken."""
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder}: is there already; allowed: a folder without {folder.name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as name:
        aside = Path(name, folder.name)
        for member in members.values():
            path = aside / member.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if member.info.issym():
                path.symlink_to(member.info.linkname)
                continue
            with path.open("xb") as out:
                try:
                    out.writelines(_chunks(file, member))
                    out.flush()
                except OSError as error:  # as of a full disk
                    error.filename = error.filename or str(path)
                    raise
            path.chmod(member.info.mode)
            os.utime(path, (member.info.mtime, member.info.mtime))
        aside.rename(folder)
