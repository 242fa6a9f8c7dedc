"""Records on disk that are what their experiment leaves: its parameters, metrics, units and conditions.

Who plans, judges or draws reads records here; `repro.records` knows files alone.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from repro import experiments
from repro.records import record
from repro.records.record import Collection, Record, RecordError


def read(path: Path) -> Record:
    """The record of a file; RecordError names the file and its fault, be it of the file or of what the record says."""
    found = record.read(path)
    if faults := "; ".join(_faults(found, path.parent.name)):
        raise RecordError(f"{path}: not used: {faults}")
    return found


def collect(folder: Path) -> Collection:
    """Every record below `folder`, and in words the files that are none."""
    return record.collect(folder, read)


def _faults(found: Record, folder: str) -> Iterator[str]:
    """What its experiment would not have written: key, what was found, what is allowed."""
    known = experiments.names()
    if found.experiment not in known:
        yield f"experiment: found {found.experiment!r}; allowed: {', '.join(known)}"
        return
    if folder in known and folder != found.experiment:
        yield f"experiment: found it in the folder of {folder}"
    experiment = experiments.get(found.experiment)
    values, units = {name: metric.value for name, metric in found.metrics.items()}, experiment.metrics.units()
    parts = [("point", experiment.parameters, found.point), ("metrics", experiment.metrics, values)]
    for part, model, said in parts if found.status == "ok" else parts[:1]:
        try:
            model.model_validate(said)
        except ValidationError as error:
            yield f"{part}: {record.fault(error)}"
    for name in values.keys() & units.keys():
        if (unit := found.metrics[name].unit) != units[name]:
            yield f"metrics.{name}.unit: found {unit!r}; allowed: {units[name]!r}"
    if unknown := sorted(found.conditions.keys() - set(experiment.conditions)):
        yield f"conditions: found {', '.join(unknown)}; allowed: {', '.join(experiment.conditions) or 'none'}"
