"""Plan files: one for every call of Snakemake, which its jobs read as well."""

import hashlib
import time
from pathlib import Path

from repro import paths
from repro.files import replacing

_KEPT_DAYS = 60  # longer than any job waits in a queue


def keep(text: str) -> Path:
    """Write a plan where no later one replaces it; its path, relative to the root. Removes plans that no job needs."""
    folder = paths.root() / "results/plans"
    for old in folder.glob("*.json"):
        if time.time() - old.stat().st_mtime > _KEPT_DAYS * 86400:
            old.unlink(missing_ok=True)
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    with replacing(file) as temporary:
        temporary.write_text(text)
    return file.relative_to(paths.root())
