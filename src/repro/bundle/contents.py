"""What goes into a bundle: the files of a commit, a run as it was made and shown, and what describes them."""

import io
import json
import re
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from repro import __version__, files, paths
from repro.bundle import crate
from repro.bundle.archive import Entry, write
from repro.bundle.unpack import unpack
from repro.claims import registry
from repro.experiments import stored
from repro.plan import config
from repro.records.record import Collection

# As deep as the folder of a run, so that the report's links hold; not named as one: what stands there, Snakemake takes for
# drawn, and `replot` would draw nothing.
SHOWN = "results/rendered"
# No executed notebooks: their cells and tables get a random id each time. Figures are the same whenever they are drawn.
_SHOWN = ("report.html", "claims.json", "figures/*.png", "figures/*.svg")
_MADE = ("**/*.json", "**/*.parquet")
# The report's links to them lead to the sources instead.
_EXECUTED = re.compile(rb'href="notebooks/(\w+)\.html[^"]*"')


class Bundle(NamedTuple):
    """A bundle that has been written."""

    path: Path
    files: int
    nbytes: int
    commit: str


def make(run: Path, out: Path | None = None) -> Bundle:
    """Write the bundle of the present commit and of the run in the folder `run`; by default below `results/`.

    `run` has report, verdicts and figures. Where it has no records, as `results/replot`, they are the shipped ones.
    ValueError for a checkout with changes, a run without report, files that are no records, or verdicts on others.
    """
    run = run.absolute()
    commit, when = _commit()
    entries = _tracked(commit)
    shown = _under(run, _SHOWN)
    for part in ("report.html", "claims.json", "figures/"):
        if not any(path.startswith(part) for path in shown):
            raise ValueError(f"{run}: found no {part}; allowed: a finished run, or results/replot (`make replot`)")
    own = (run / "records").is_dir()
    shipped = config.load()[0].shipped
    records = run / "records" if own else paths.root() / shipped / "records"
    found = stored.collect(records)
    _check(run, found, shown["claims.json"])
    if own:
        shown |= {f"records/{path}": text for path, text in _under(records, _MADE).items()}
    shown["report.html"] = _EXECUTED.sub(rb'href="../../notebooks/\1.ipynb"', shown["report.html"])
    entries |= {f"{SHOWN}/{path}": Entry(text) for path, text in shown.items()}
    where = f"{SHOWN if own else shipped}/records/"
    described = crate.describe(where, f"{SHOWN}/", list(found.records.values()), when, commit)
    entries[crate.NAME] = Entry(described)
    top = f"repro-papers-{__version__}-{commit[:7]}"
    path = out or paths.root() / "results" / f"{top}{f'-{run.resolve().name}' if own else ''}.tar"
    with files.replacing(path) as temporary:
        write(temporary, top, entries, int(when.timestamp()))
        checked = unpack(temporary, None)  # as whoever gets it does
    return Bundle(path, checked.files, checked.nbytes, commit)


def _git(*words: str) -> bytes:
    """What git prints in the checkout. ValueError where there is none."""
    root = paths.root()
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise ValueError(f"{root}: a bundle is made from a git commit; git {words[0]} says: {reason}") from error
    return done.stdout


def _commit() -> tuple[str, datetime]:
    """Hash and time of the present commit. ValueError where the checkout differs from it."""
    root = paths.root().resolve()
    if (top := Path(_git("rev-parse", "--show-toplevel").decode().rstrip("\n")).resolve()) != root:
        raise ValueError(f"{root}: found no git checkout here but in {top}; allowed: the root of a checkout")
    if changed := _git("status", "--porcelain").decode(errors="replace").splitlines():
        named = ", ".join(line[3:] for line in changed[:3]) + (", ..." if len(changed) > 3 else "")
        raise ValueError(f"{root}: found {len(changed)} files that differ from the commit ({named}); allowed: none")
    commit, seconds = _git("show", "--no-patch", "--format=%H %ct", "HEAD").decode().split()
    return commit, datetime.fromtimestamp(int(seconds), UTC)


def _tracked(commit: str) -> dict[str, Entry]:
    """Every file and link of a commit, as it is stored there."""
    entries = {}
    stream = _git("-c", "core.autocrlf=false", "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(stream)) as tar:
        for member in tar:
            if member.issym():
                entries[member.name] = Entry(member.linkname.encode(), "link")
            elif (file := tar.extractfile(member)) is not None:  # a folder has none
                entries[member.name] = Entry(file.read(), "program" if member.mode & 0o100 else "file")
    return entries


def _under(folder: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    """Ordinary files below a folder that fit a pattern, by their path relative to it."""
    found = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): files.read(path) for path in found}


def _check(run: Path, found: Collection, verdicts: bytes) -> None:
    """ValueError where a file is no record, or the verdicts of the run are not those that its records give now."""
    if found.problems or not found.records:
        said = "; ".join(found.problems) or "no records"
        raise ValueError(f"{run}: found {said}; allowed: records alone")
    judged = [row.model_dump(mode="json") for row in registry.evaluate(registry.load(), found.records, found.problems)]
    try:
        claimed = json.loads(verdicts)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{run}/claims.json: found no JSON: {error}") from error
    if claimed != json.loads(json.dumps(judged)):
        raise ValueError(f"{run}/claims.json: found verdicts on other records or by other claims; show the run anew")
