"""Where the project's files are: the repository root, found from the working directory or from an editable install."""

import os
from pathlib import Path

_MARK = Path("config/claims.yaml")


def root() -> Path:
    """Repository root: `$REPRO_ROOT`, else the working directory or its nearest parent that holds `config/claims.yaml`,
    else the checkout this package is installed from.

    FileNotFoundError where $REPRO_ROOT is set and is no checkout, where none is found (only the workflow needs one), and
    in a working directory that was removed.
    """
    if found := os.environ.get("REPRO_ROOT"):
        if not (Path(found) / _MARK).exists():
            raise FileNotFoundError(f"REPRO_ROOT is {found}, which holds no {_MARK}")
        return Path(found)
    try:
        here = Path.cwd().resolve()
    except FileNotFoundError as error:
        raise FileNotFoundError("the working directory was removed: go to another, or set REPRO_ROOT") from error
    for folder in (here, *here.parents, *Path(__file__).resolve().parents):
        if (folder / _MARK).exists():
            return folder
    raise FileNotFoundError(f"no checkout of repro at or above {here}: set REPRO_ROOT, or run inside the repository")


def data(name: str) -> Path:
    """Path of a shipped input `data/<name>`; FileNotFoundError names the file when it is missing."""
    path = root() / "data" / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: shipped input is missing; restore it with `git checkout data`")
    return path
