"""Placements as files: the published solver's CSV."""

import csv
import os
import tempfile
from pathlib import Path

import numpy as np

HEADER = ["Expert", "Node"]  # the published solver calls a GPU a node


def write_csv(gpu: np.ndarray, path: str | Path) -> None:
    """Write `gpu` (int [layers, E]) as the published solver does: `Expert,Node`, one row per expert of every layer.

    Experts are numbered through the layers, expert e of layer l is l·E + e; `Node` is its GPU, counted over all nodes. The file
    appears whole or not at all.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(enumerate(gpu.ravel().tolist()))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def read_csv(path: str | Path, num_experts: int) -> np.ndarray:
    """int64 [layers, E] from such a file; ValueError names the file when it is not one or misses an expert."""
    with Path(path).open(newline="") as file:
        header, *rows = list(csv.reader(file)) or [[]]
    if header != HEADER:
        raise ValueError(f"{path}: header is {header}, must be {HEADER}")
    try:
        gpu = {int(expert): int(node) for expert, node in rows}
    except ValueError as error:
        raise ValueError(f"{path}: a row is not two integers: {error}") from error
    if sorted(gpu) != list(range(len(rows))) or len(rows) % num_experts or not rows:
        raise ValueError(f"{path}: {len(rows)} rows do not number the experts of whole layers of {num_experts}")
    return np.array([gpu[expert] for expert in range(len(rows))]).reshape(-1, num_experts)
