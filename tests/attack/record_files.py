"""Run records and their series as files: what is read is what everybody downstream can use."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from attack.fuzz import Parser

from repro import paths
from repro.claims import registry
from repro.experiments import stored
from repro.records import record

SHIPPED = paths.root() / "results/reference/laptop-2core/records"
CLAIMS = registry.load()


def shipped(experiment: str, count: int | None = None) -> list[Path]:
    """Shipped records of an experiment, the first of them in the order of their names."""
    return sorted((SHIPPED / experiment).glob("*.json"))[:count]


def copies(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Copies of records with their series, in the folder of their experiment."""
    made = []
    for file in files:
        (here := folder / file.parent.name).mkdir(parents=True, exist_ok=True)
        for each in (file.with_suffix(".parquet"), file):
            if each.exists():
                shutil.copy(each, here)
        made.append(here / file.name)
    return made


def judged(runs: dict[Path, record.Record], problems: Sequence[str] = ()) -> list[registry.Verdict]:
    """Verdicts of all claims that read these runs' experiments, as strict JSON can hold them."""
    mine = {run.experiment for run in runs.values()}
    found = registry.evaluate([c for c in CLAIMS if c.value and c.value.experiment in mine], runs, problems)
    json.dumps([row.model_dump(mode="json") for row in found], allow_nan=False)
    return found


def _records(folder: Path) -> list[Path]:
    return copies(folder, [file for name in ("exflow_placement", "scaling_decode") for file in shipped(name, 4)])


def _series(folder: Path) -> list[Path]:
    files = [file for name in ("zero_train", "moe_decode", "scaling_map", "zero_plan") for file in shipped(name, 2)]
    return [file.with_suffix(".parquet") for file in copies(folder, files)]


def _use_record(path: Path) -> None:
    judged({path: stored.read(path)})


def _use_series(path: Path) -> None:
    """What passes for whole can be read."""
    record.check_series(path.with_suffix(".json"), path.name)
    record.frame_of(path)


RECORD = Parser(_records, _use_record, (record.RecordError,))
PARQUET = Parser(_series, _use_series, (record.RecordError,))
