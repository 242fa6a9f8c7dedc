"""Published times of collectives that were held out, and how far predictions are off there: for docs/scaling.md."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from repro.records import provenance, record
from repro.scaling.published import LARGE

# Source and split of `scaling_network`, what stands in the table, and whether only messages as large as training's count.
_ROWS = (
    ("leonardo", "ranks", "Leonardo", "32 to 256 nodes, of 16 fitted", False),
    ("leonardo", "sizes", "Leonardo", "more than 1 MiB", False),
    ("alps", "ranks", "Alps", "32 to 512 nodes, of 16 fitted", False),
    ("alps", "sizes", "Alps", "more than 1 MiB", False),
    ("lumi", "ranks", "LUMI, RCCL", "32 to 64 nodes, of 16 fitted", False),
    ("lumi", "sizes", "LUMI, RCCL", "more than 1 MiB", False),
    ("lumi", "machine", "LUMI, RCCL", "all: `frontier` of the catalogue, only `peer_s` fitted", False),
    ("lumi", "scenario", "LUMI, RCCL", "all: `frontier-rccl`, only `peer_s` fitted", False),
    ("slingshot11", "ranks", "LUMI, Cray MPICH, CPUs", "32 and 100 nodes, reduce-scatter", False),
    ("slingshot11", "sizes", "LUMI, Cray MPICH, CPUs", "more than 1 MiB", False),
    ("a100_node", "ranks", "one DGX A100", "8 GPUs, more than 1 MiB", True),
    ("a100_node", "ranks", "one DGX A100", "8 GPUs, all sizes", False),
    ("a100_node", "sizes", "one DGX A100", "more than 1 MiB", False),
    ("a100_node", "machine", "one DGX A100", "all: `wilkes3` of the catalogue, nothing fitted", False),
    ("a100_dgx", "ranks", "two DGX A100", "8 and 16 GPUs", False),
    ("a100_dgx", "sizes", "two DGX A100", "more than 1 MiB", False),
)


def held_out(records: Mapping[Path, record.Record]) -> list[dict[str, object]]:
    """A row for each split of each table: `table`, `part`, errors as shares (`median`, `p90`, `worst`), the share of
    the rows `inside` their band, half of the band as a `factor`, and whether `older` code made them. ValueError for a
    split without a run."""
    paths: dict[tuple[str, str], Path] = {}
    for path, run in records.items():
        if run.experiment == "scaling_network" and run.point["protocols"] == 3:
            paths[run.point["source"], run.point["split"]] = path
    if missing := {row[:2] for row in _ROWS} - paths.keys():
        raise ValueError(
            f"docs/scaling.md shows scaling_network of {sorted(missing)[0]}: found no such run in the shipped records"
        )
    older = provenance.older({path: records[path] for path in paths.values()})
    found = [(paths[source, split], table, part, large) for source, split, table, part, large in _ROWS]
    return [_row(path, *about) | {"older": path in older} for path, *about in found]


def _row(path: Path, table: str, part: str, large: bool) -> dict[str, object]:
    rows = record.read_series(path).query("part == 'held_out'")
    rows = rows[rows.nbytes > LARGE] if large else rows
    median, p90, worst = np.expm1(rows.log_error.abs().quantile([0.5, 0.9, 1]))
    inside, factor = rows.inside.astype(bool).mean(), np.sqrt(rows.high / rows.low).median()
    return {
        "table": table,
        "part": part,
        "median": median,
        "p90": p90,
        "worst": worst,
        "inside": inside,
        "factor": factor,
    }
