"""The form of a bundle: a plain tar archive of ordinary files and symbolic links below one folder, checksums first.

Plain, since another version of a compressor writes other bytes. `tar xf` unpacks it, `sha256sum -c SHA256SUMS` checks
it; `unpack.py` does both and trusts neither names nor links.
"""

import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MANIFEST = "SHA256SUMS"
MODES = {"file": 0o644, "program": 0o755, "link": 0o777}
_LINK = "# link "  # sha256sum takes the line for a comment


class BundleError(ValueError):
    """An archive that is no bundle. The message names the archive, the member, what was found and what is allowed."""

    def __init__(self, archive: Path, member: str, found: str, allowed: str) -> None:
        place = f"{archive}: {member!r}" if member else str(archive)
        super().__init__(f"{place}: found {found}; allowed: {allowed}")


class Entry(NamedTuple):
    """A member: a file's contents, or of a symbolic link the path that it names."""

    contents: bytes
    kind: str = "file"  # a key of MODES


def manifest(entries: Mapping[str, Entry]) -> bytes:
    """A line of each member: `HASH  PATH` of a file, `# link PATH -> TARGET` of a symbolic link."""
    lines = []
    for path, entry in sorted(entries.items()):
        if entry.kind == "link":
            lines.append(f"{_LINK}{path} -> {entry.contents.decode()}")
        else:
            lines.append(f"{hashlib.sha256(entry.contents).hexdigest()}  {path}")
    return "".join(f"{line}\n" for line in lines).encode()


def listed(text: str) -> dict[str, str]:
    """What a manifest says: of a file its hash, of a link `-> TARGET`. ValueError for a line that is neither."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(_LINK):
            path, _, target = line.removeprefix(_LINK).partition(" -> ")
            what = f"-> {target}"
        else:
            what, _, path = line.partition("  ")
        if not (path and what) or path in found:
            raise ValueError(f"line {number}: {line[:80]!r}")
        found[path] = what
    return found


def write(out: Path, top: str, entries: Mapping[str, Entry], when: int) -> None:
    """Write the members, sorted, and their manifest below the folder `top`; each of them is of the time `when`, the
    owner 0, and one of three modes. What pax adds to a name that has over 100 bytes or is not ASCII is the name alone."""
    ordered = {MANIFEST: Entry(manifest(entries)), **dict(sorted(entries.items()))}
    with tarfile.open(out, "w", format=tarfile.PAX_FORMAT) as tar:
        for path, entry in ordered.items():
            member = tarfile.TarInfo(f"{top}/{path}")
            member.mtime, member.mode = when, MODES[entry.kind]
            if entry.kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, entry.contents.decode()
            else:
                member.size = len(entry.contents)
            tar.addfile(member, io.BytesIO(entry.contents))
