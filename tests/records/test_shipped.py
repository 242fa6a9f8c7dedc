"""Shipped records are as their runs wrote them: by committed code, and never edited.

A record that is made again has another `provenance.start`. One of the same start has to be, byte for byte, what was
first committed of that run: an edit is refused, an edit that was taken back is not.
"""

import json
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from repro import paths

SHIPPED = "results/reference"


def git(root: Path, *arguments: str, text: str = "") -> bytes:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, input=text.encode(), capture_output=True, check=True).stdout


def no_history(root: Path) -> str:
    """Why the history of a checkout cannot be read; empty if it can."""
    try:
        top, shallow = git(root, "rev-parse", "--show-toplevel", "--is-shallow-repository").decode().split("\n")[:2]
    except FileNotFoundError:
        return "git is not installed"
    except subprocess.CalledProcessError:
        return "not a git checkout"
    if Path(top) != root.resolve():
        return "not a git checkout of its own"
    return "a shallow clone, which has no history" if shallow == "true" else ""


def versions(root: Path, files: set[str]) -> dict[str, list[bytes]]:
    """Every content that each of `files` ever had in the history of HEAD, the oldest first."""
    options = ("--raw", "--no-renames", "--abbrev=40", "--format=", "--full-history", "-m", "--topo-order", "--reverse")
    blobs = defaultdict(list)
    for line in filter(None, git(root, "log", *options, "--", SHIPPED).decode().split("\n")):
        change, name = line.split("\t")
        blobs[name] += [blob for blob in change.split()[3:4] if blob.strip("0")]
    wanted = sorted({blob for name in files for blob in blobs[name]})
    batch, content = git(root, "cat-file", "--batch", text="\n".join(wanted)), {}
    while batch:
        head, _, rest = batch.partition(b"\n")
        blob, _, size = head.decode().split()
        content[blob], batch = rest[: int(size)], rest[int(size) + 1 :]
    return {name: [content[blob] for blob in blobs[name]] for name in files}


def violations(root: Path) -> list[str]:
    """What is wrong with the shipped records of a checkout, one line each."""
    files = {
        path.relative_to(root).as_posix(): path.read_bytes() for path in root.glob(f"{SHIPPED}/*/records/**/*.json")
    }
    ancestors = set(git(root, "rev-list", "HEAD").decode().split())
    found = []
    for name, once in sorted(versions(root, set(files)).items()):
        provenance = json.loads(files[name])["provenance"]
        commit, start = provenance["git_commit"], provenance["start"]
        if commit not in ancestors:
            found.append(f"{name}: its commit {commit[:12] or '(none)'} is no ancestor of HEAD")
        if provenance["git_dirty"]:
            found.append(f"{name}: made by code that was not committed")
        recorded = next((text for text in once if json.loads(text)["provenance"]["start"] == start), files[name])
        if recorded != files[name]:
            found.append(f"{name}: is not what the run of {start} wrote")
    return found + [f"{name}: changed without its record" for name in series_alone(root)]


def series_alone(root: Path) -> list[str]:
    """Series that changed though their record did not: no commit added the two together as they are. Some claims read
    series."""
    names = sorted(path.relative_to(root).as_posix() for path in root.glob(f"{SHIPPED}/*/records/**/*.parquet"))
    if not names:
        return []
    records = [name.removesuffix("parquet") + "json" for name in names]
    listed = "\n".join(str(root / name) for name in (*names, *records))
    blobs = git(root, "hash-object", "--no-filters", "--stdin-paths", text=listed).decode().split()
    options = ("--raw", "--no-renames", "--abbrev=40", "--full-history", "-m", "--format=%x00")
    together, committed = set[tuple[str, str]](), set[tuple[str, str]]()
    for commit in git(root, "log", *options, "--", SHIPPED).decode().split("\0"):
        changed = {line.split("\t")[1]: line.split()[3] for line in commit.split("\n") if "\t" in line}
        committed |= changed.items()
        together |= {pair for pair in changed.items() if pair[0].removesuffix("parquet") + "json" in changed}
    now, of_record = blobs[: len(names)], zip(records, blobs[len(names) :], strict=True)
    return [
        name
        for name, blob, record in zip(names, now, of_record, strict=True)
        if record in committed and (name, blob) not in together
    ]


def test_shipped_records_are_of_committed_code_and_unchanged():
    if reason := no_history(paths.root()):
        pytest.skip(reason)
    assert any(paths.root().glob(f"{SHIPPED}/*/records/**/*.json"))
    found = violations(paths.root())
    assert not found, "\n".join(["make these records again, never edit one:", *found])


# --- the check itself, in a repository of its own ---


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "-q")
    git(root, "config", "user.name", "tester")
    git(root, "config", "user.email", "tester@localhost")
    (root / "code.py").write_text("1\n")
    commit(root)
    return root


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "step")
    return git(root, "rev-parse", "HEAD").decode().strip()


def ship(root: Path, name: str = "a", start: str = "2026-01-01", value: float = 1.0, **provenance) -> str:
    """Write and commit a record; returns the commit."""
    path = root / SHIPPED / "machine/records/timing" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = git(root, "rev-parse", "HEAD").decode().strip()
    provenance = {"git_commit": head, "git_dirty": False, "start": start} | provenance
    path.write_text(json.dumps({"value": value, "provenance": provenance}))
    return commit(root)


def reasons(root: Path) -> list[str]:
    return [line.split("timing/")[1] for line in violations(root)]


def test_a_record_that_is_made_again_is_fine(checkout):
    ship(checkout)
    ship(checkout, start="2026-01-02", value=2.0)
    ship(checkout, "b")
    assert reasons(checkout) == [] and no_history(checkout) == ""


def test_an_edited_record_is_refused_whether_or_not_the_edit_is_committed(checkout):
    head = ship(checkout)
    ship(checkout, "b", git_commit=head)
    edited = ship(checkout, value=1.1)
    path = checkout / SHIPPED / "machine/records/timing/b.json"
    path.write_text(path.read_text() + "\n")
    assert reasons(checkout) == [f"{name}.json: is not what the run of 2026-01-01 wrote" for name in "ab"]
    git(checkout, "checkout", "-q", f"{edited}~", "--", SHIPPED)
    path.write_text(path.read_text().rstrip("\n"))
    assert reasons(checkout) == [], "both edits are taken back"


def test_a_series_that_changes_without_its_record_is_refused(checkout):
    series = checkout / SHIPPED / "machine/records/timing/a.parquet"
    series.parent.mkdir(parents=True)
    series.write_bytes(b"first")
    ship(checkout)
    series.write_bytes(b"second")
    ship(checkout, start="2026-01-02", value=2.0)
    assert reasons(checkout) == []
    series.write_bytes(b"edited")
    assert reasons(checkout) == ["a.parquet: changed without its record"]
    commit(checkout)
    assert reasons(checkout) == ["a.parquet: changed without its record"]


def test_an_edit_behind_a_deletion_or_on_a_merged_branch_is_refused(checkout):
    head = ship(checkout)
    git(checkout, "rm", "-q", "-r", SHIPPED)
    commit(checkout)
    git(checkout, "checkout", "-qb", "side")
    ship(checkout, value=1.1, git_commit=head)
    git(checkout, "checkout", "-q", "-")
    (checkout / "code.py").write_text("2\n")
    commit(checkout)
    git(checkout, "merge", "-q", "--no-ff", "-m", "merge", "side")
    assert reasons(checkout) == ["a.json: is not what the run of 2026-01-01 wrote"]


def test_a_record_of_unknown_or_uncommitted_code_is_refused(checkout):
    git(checkout, "checkout", "-qb", "side")
    (checkout / "code.py").write_text("2\n")
    elsewhere = commit(checkout)
    git(checkout, "checkout", "-q", "-")
    ship(checkout, "a", git_commit=elsewhere)
    ship(checkout, "b", git_commit="")
    ship(checkout, "c", git_dirty=True)
    assert reasons(checkout) == [
        f"a.json: its commit {elsewhere[:12]} is no ancestor of HEAD",
        "b.json: its commit (none) is no ancestor of HEAD",
        "c.json: made by code that was not committed",
    ]


def test_without_history_the_check_says_why(checkout, tmp_path):
    ship(checkout)
    git(tmp_path, "clone", "-q", "--depth=1", checkout.as_uri(), "shallow")
    assert no_history(tmp_path / "shallow") == "a shallow clone, which has no history"
    assert no_history(checkout / "results") == "not a git checkout of its own"
    assert no_history(tmp_path) == "not a git checkout"
