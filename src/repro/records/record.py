"""Run records: the only thing that crosses from running to reading.

One JSON file per point and repeat, written to a temporary file and renamed, so that a reader never sees half of one.
A long series (loss curve, request table) goes beside it as Parquet.
"""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, model_validator

from repro.files import replacing

if TYPE_CHECKING:  # it takes half a second to import, and the plan needs no series
    import pandas as pd

SCHEMA_VERSION = 1
Evidence = Literal["measured", "emulated", "modelled"]
Scalar = bool | int | float | str


class Cause(StrEnum):
    """Why a point has no numbers."""

    OOM = "oom"
    TIMEOUT = "timeout"
    NODE_FAILURE = "node_failure"
    CANCELLED = "cancelled"  # somebody ended the job
    PREEMPTED = "preempted"  # the scheduler gave the nodes to another job
    COMM_HANG = "comm_hang"
    ASSERTION = "assertion"
    BAD_INPUT = "bad_input"
    MISSING_HARDWARE = "missing_hardware"
    UNEXPECTED = "unexpected"  # an exception that fits none of the above; `detail` holds it


class Strict(BaseModel, extra="forbid", allow_inf_nan=False):
    """A model that refuses unknown keys, nan and infinity."""


class Metric(Strict):
    """A number with its unit: `s`, `bytes`, `tokens/s`, `hops/token`, `bits`; `1` for a ratio or a count."""

    value: float
    unit: str


class Provenance(Strict):
    """What produced the numbers. Empty strings mean: not known here (no git checkout, no GPU)."""

    git_commit: str = ""
    git_dirty: bool = False
    source_hash: str = ""
    config_hash: str = ""
    lock_hash: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    python: str = ""
    os: str = ""
    cpu: str = ""
    cores: int = 0
    memory_gib: float = 0.0
    gpu: list[str] = Field(default_factory=list)
    driver: str = ""
    topology: str = ""
    hosts: list[str] = Field(default_factory=list)
    slurm: dict[str, str] = Field(default_factory=dict)
    start: AwareDatetime
    end: AwareDatetime


class Record(Strict):
    """One run of one point. `conditions`: what the numbers depend on beyond the point (e.g. fabric: shaped)."""

    schema_version: Literal[1] = SCHEMA_VERSION
    experiment: str
    point: dict[str, Scalar | None]
    repeat: int = Field(ge=0)
    seed: int
    evidence: Evidence | None = None  # None only where nothing was produced
    status: Literal["ok", "failed", "skipped"]
    cause: Cause | None = None
    detail: str = ""
    metrics: dict[str, Metric] = Field(default_factory=dict)
    conditions: dict[str, str] = Field(default_factory=dict)
    series: str | None = None  # file name of the Parquet beside the record
    attempt: int = Field(1, ge=1)
    provenance: Provenance

    @model_validator(mode="after")
    def _consistent(self) -> "Record":
        if (self.status == "ok") != (self.cause is None):
            raise ValueError(f"status {self.status!r} with cause {self.cause!r}: failed and skipped records have one")
        if self.status == "ok" and not (self.metrics and self.evidence):
            raise ValueError("status 'ok' needs at least one metric and an evidence kind")
        return self

    @property
    def facts(self) -> dict[str, Any]:
        """Parameters, conditions and values of metrics by name (of equal names the later wins)."""
        return self.point | self.conditions | {name: metric.value for name, metric in self.metrics.items()}


class RecordError(ValueError):
    """A file among the records that is not a valid record; the message names the file and what is wrong with it."""


def write(record: Record, path: Path, series: "pd.DataFrame | None" = None) -> None:
    """Write `record` (and its series) atomically; the record comes last, so a record on disk always has its series."""
    if series is not None:
        parquet = path.with_suffix(".parquet")
        with replacing(parquet) as temporary:
            series.to_parquet(temporary, index=False)
        record = record.model_copy(update={"series": parquet.name})
    with replacing(path) as temporary:
        temporary.write_text(record.model_dump_json(indent=1) + "\n")


def read(path: Path) -> Record:
    """Read one record; RecordError names the file and its fault (cut short, no record, other version, series lost)."""
    try:
        record = Record.model_validate_json(path.read_text())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise RecordError(f"{path}: not a run record: {where}: {first['msg']}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read: {error}") from error
    if record.series is not None and not _whole_parquet(path.parent / record.series):
        raise RecordError(f"{path}: its series {record.series} is missing or cut short")
    return record


def _whole_parquet(path: Path) -> bool:
    """Whether a file ends as Parquet does; the end is written last."""
    try:
        with path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            return file.read() == b"PAR1"
    except OSError:
        return False


def read_series(path: Path) -> "pd.DataFrame":
    """The Parquet series of the record at `path`; RecordError when the record has none or it cannot be read."""
    import pandas as pd

    record = read(path)
    if record.series is None:
        raise RecordError(f"{path}: this record has no series")
    try:
        return pd.read_parquet(path.parent / record.series)
    except Exception as error:
        raise RecordError(f"{path.parent / record.series}: series cannot be read: {error}") from error


class Collection(BaseModel):
    """All records under a folder by path, and the files that should have been records but are not."""

    records: dict[Path, Record]
    problems: list[str]


def collect(folder: Path) -> Collection:
    """Read every `*.json` below `folder`. Bad files are listed in `problems`, never dropped silently."""
    records, problems = {}, []
    for path in sorted(folder.rglob("*.json")):
        try:
            records[path] = read(path)
        except RecordError as error:
            problems.append(str(error))
    return Collection(records=records, problems=problems)


def frame(records: dict[Path, Record]) -> "pd.DataFrame":
    """Records as a table, one row each.

    Columns: `path`, `experiment`, `repeat`, `seed`, `evidence`, `status`, `cause`, then every parameter, condition and
    metric under its own name (metrics as floats).
    """
    import pandas as pd

    own = {"experiment", "repeat", "seed", "evidence", "status", "cause"}
    return pd.DataFrame(
        {"path": path, **record.model_dump(include=own), **record.facts} for path, record in records.items()
    )
