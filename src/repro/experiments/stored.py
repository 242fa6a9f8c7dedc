"""Records on disk that are what their experiment leaves: its parameters, metrics, units and conditions.

Who plans, judges or draws reads records here; `repro.records` knows files alone.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from repro import experiments
from repro.experiments.base import Point
from repro.records import record
from repro.records.record import Collection, Record, RecordError


def read(path: Path) -> Record:
    """The record of a file; RecordError names the file and its fault, be it of the file or of what the record says."""
    found = record.read(path)
    if faults := "; ".join(_faults(found, path)):
        raise RecordError(f"{path}: not used: {faults}")
    return found


def collect(folder: Path) -> Collection:
    """Every record below `folder`, and in words the files that are none. Of two records of one point and repeat neither
    is used: nothing tells which of them is meant. A parameter that a record lacks has its default."""
    found = record.collect(folder, read)
    for alike in _of_one_point(found.records):
        for path in alike:
            del found.records[path]
            others = ", ".join(str(other) for other in alike if other != path)
            found.problems.append(f"{path}: not used: of the same point and repeat as {others}; allowed: one of them")
    for path, run in found.records.items():
        found.records[path] = _whole(run)
    return found


def _whole(run: Record) -> Record:
    """With every parameter in its point, so that runs from before and after a parameter was added are of one setting."""
    if not (experiments.get(run.experiment).parameters.model_fields.keys() - run.point.keys()):
        return run
    return run.model_copy(update={"point": point(run).model_dump(mode="json") | run.point})


def point(run: Record) -> Point:
    """Its parameters, equal in all repeats. One that a record lacks has its default: it is of a time before there was
    that parameter."""
    return experiments.get(run.experiment).parameters.model_validate(run.point)


def place(run: Record) -> tuple[Point, int]:
    """Point and repeat, the same for two records of one run."""
    return point(run), run.repeat


def _of_one_point(records: Mapping[Path, Record]) -> list[list[Path]]:
    """The records that share point and repeat."""
    found = defaultdict(list)
    for path, run in records.items():
        found[place(run)].append(path)
    return [alike for alike in found.values() if len(alike) > 1]


def _faults(found: Record, path: Path) -> Iterator[str]:
    """What its experiment would not have written: key, what was found, what is allowed."""
    known, folder = experiments.names(), path.parent.name
    if found.experiment not in known:
        yield f"experiment: found {found.experiment!r}; allowed: {', '.join(known)}"
        return
    if folder in known and folder != found.experiment:
        yield f"experiment: found it in the folder of {folder}"
    if not path.stem.endswith(end := f"-{record.name_end(found.experiment, found.point, found.repeat)}"):
        yield f"its name: found {path.name}; allowed: any label before {end}.json, the repeat and hash of its point"
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
