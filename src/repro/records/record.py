"""Run records: the only thing that crosses from running to reading.

One JSON file per point and repeat, written to a temporary file and renamed, so that a reader never sees half of one.
A long series (loss curve, request table) goes beside it as Parquet.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, AwareDatetime, BaseModel, Field, ValidationError, model_validator

from repro import files

if TYPE_CHECKING:  # they take half a second to import
    import pandas as pd
    import pyarrow

SCHEMA_VERSION = 1
Evidence = Literal["measured", "emulated", "modelled"]
Scalar = bool | int | float | str
_NAMED = re.compile(r".*-(r\d+-[0-9a-f]{8})")  # a record's name, as the plan gives it


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
    """A number with its unit: `s`, `bytes`, `tokens/s`, `hops/token`, `bits`; `×` for a ratio, `1` for a count or a share."""

    value: float
    unit: str


def _short(number: Any) -> Any:
    """A number or text, unless it is a whole number that neither a table nor a float can hold."""
    if isinstance(number, int) and not -(2**63) <= number < 2**63:
        raise ValueError("a whole number of more than 64 bits")
    return number


Whole = Annotated[int, AfterValidator(_short)]


class Provenance(Strict):
    """What produced the numbers. Empty strings mean: not known here (no git checkout, no GPU)."""

    git_commit: str = ""
    git_dirty: bool = False
    source_hash: str = ""
    gpu_hash: str = ""  # of the code for GPUs, where there was one
    config_hash: str = ""
    lock_hash: str = ""
    packages: dict[str, str] = Field(default_factory=dict)
    python: str = ""
    os: str = ""
    cpu: str = ""
    cpu_kind: str = ""  # what tells apart processors that have one name; not in records of before 2026-11-29
    cores: int = 0
    memory_gib: float = 0.0
    gpu: list[str] = Field(default_factory=list)
    driver: str = ""
    topology: str = ""
    hosts: list[str] = Field(default_factory=list)
    slurm: dict[str, str] = Field(default_factory=dict)
    start: AwareDatetime
    end: AwareDatetime

    @property
    def processor(self) -> str:
        """Its name, and what tells it apart from others of that name, where it is known."""
        return ", ".join(filter(None, [self.cpu, self.cpu_kind]))


class Record(Strict):
    """One run of one point. `conditions`: what the numbers depend on beyond the point (e.g. fabric: shaped)."""

    schema_version: Literal[1] = SCHEMA_VERSION
    experiment: str
    point: dict[str, Annotated[Scalar | None, AfterValidator(_short)]]
    repeat: Whole = Field(ge=0)
    seed: Whole
    evidence: Evidence | None = None  # None only where nothing was produced
    status: Literal["ok", "failed", "skipped"]
    cause: Cause | None = None
    detail: str = ""
    metrics: dict[str, Metric] = Field(default_factory=dict)
    conditions: dict[str, str] = Field(default_factory=dict)
    series: str | None = None  # file name of the Parquet beside the record
    attempt: Whole = Field(1, ge=1)
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


def name_end(experiment: str, point: Mapping[str, Any], repeat: int) -> str:
    """How the name of the file of a point and repeat ends, after its label and a dash: `r0-1a2b3c4d`, by a hash of every
    parameter."""
    text = json.dumps([experiment, point, repeat], sort_keys=True)
    return f"r{repeat}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def write(record: Record, path: Path, series: "pd.DataFrame | None" = None) -> None:
    """Write the series, then the record, each atomically: a new record on disk always has its series. An old one that is
    being replaced has the new series until then, or until the next run if the writer is killed in between."""
    if series is not None:
        parquet = path.with_suffix(".parquet")
        with files.replacing(parquet) as temporary:
            series.to_parquet(temporary, index=False, write_page_checksum=True)
        record = record.model_copy(update={"series": parquet.name})
    with files.replacing(path) as temporary:
        temporary.write_text(record.model_dump_json(indent=1) + "\n", "utf-8")


def read(path: Path) -> Record:
    """Read one record; RecordError names the file and its fault: cut short, no record, other version, its name is that
    of another point, its series lost or damaged. What its experiment says of it: `repro.experiments.stored`."""
    record = _without_series(path)
    if record.series is not None:
        check_series(path, record.series)
    return record


def _without_series(path: Path) -> Record:
    """The record, its series not looked at."""
    try:
        record = Record.model_validate_json(files.read(path))
    except ValidationError as error:
        raise RecordError(f"{path}: not a run record: {fault(error)}") from error
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    holds = name_end(record.experiment, record.point, record.repeat)
    if (named := _NAMED.fullmatch(path.stem)) and named[1] != holds:
        raise RecordError(f"{path}: its name is that of another point or repeat: found {named[1]}, this one is {holds}")
    return record


def fault(error: ValidationError) -> str:
    """The first of pydantic's errors: place, what is wrong, what was found."""
    first = error.errors(include_url=False)[0]
    found = f", found {str(first['input'])[:80]}" if first["loc"] and first["type"] != "missing" else ""
    return f"{'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}{found}"


def check_series(path: Path, name: str) -> None:
    """Read the series of the record at `path` as whoever shows it does; RecordError where that fails."""
    with _series(path, name) as file:
        _parquet(file)


@contextmanager
def _series(path: Path, name: str) -> Iterator[Path]:
    """The file of a series. RecordError where it is not one beside the record, or the block cannot read it."""
    try:
        if name != Path(name).name:
            raise ValueError("allowed: the name of a file beside the record")
        yield path.parent / name
    except Exception as error:  # pyarrow has a dozen classes for what a damaged file can hold
        reason = str(error).partition("\n")[0][:160]
        raise RecordError(f"{path}: its series {name!r} is missing or damaged: {reason}") from error


def _parquet(path: Path) -> "pyarrow.Table":
    """A whole Parquet file, every value checked."""
    import pyarrow.parquet

    contents = pyarrow.BufferReader(files.read(path))
    table = pyarrow.parquet.ParquetFile(contents, page_checksum_verification=True).read()  # read_table loads pandas
    table.validate(full=True)
    return table


def frame_of(path: Path) -> "pd.DataFrame":
    """The table of a Parquet file. Where pandas's own notes in it are damaged, without them: the values are whole."""
    table = _parquet(path)
    try:
        return table.to_pandas()
    except Exception:
        return table.replace_schema_metadata(None).to_pandas()


def read_series(path: Path) -> "pd.DataFrame":
    """The Parquet series of the record at `path`; RecordError when the record has none or it cannot be read."""
    record = _without_series(path)
    if record.series is None:
        raise RecordError(f"{path}: this record has no series")
    with _series(path, record.series) as file:
        return frame_of(file)


class Collection(BaseModel):
    """All records under a folder by path, and in words the files that should have been records but are not."""

    records: dict[Path, Record]
    problems: list[str]


def collect(folder: Path, read: Callable[[Path], Record] = read) -> Collection:
    """`read` every `*.json` below `folder`. Bad files are listed in `problems`, never dropped silently."""
    records, problems = {}, []
    for path in sorted(folder.rglob("*.json")):
        try:
            records[path] = read(path)
        except RecordError as error:
            problems.append(str(error))
    return Collection(records=records, problems=problems)


def frame(records: Mapping[Path, Record]) -> "pd.DataFrame":
    """Records as a table, one row each.

    Columns: `path`, `experiment`, `repeat`, `seed`, `evidence`, `status`, `cause`, then every parameter, condition and
    metric under its own name (metrics as floats).
    """
    import pandas as pd

    own = {"experiment", "repeat", "seed", "evidence", "status", "cause"}
    return pd.DataFrame(
        {"path": path, **record.model_dump(include=own), **record.facts} for path, record in records.items()
    )
