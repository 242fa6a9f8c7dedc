"""Rows of a benchmark that are kept as soon as they are measured, so that an interrupted run loses none."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def keep(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add rows of the same keys to a CSV file; a new one gets its head first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
