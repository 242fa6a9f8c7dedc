"""What the records of a folder say, as tables, for figures and for the tables of notebooks."""

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from repro import experiments, paths
from repro.claims import registry as claims
from repro.claims.reading import Reading
from repro.claims.sample import Runs, Sample
from repro.claims.sample import read as read_sample
from repro.experiments import stored
from repro.records import provenance, record

paper = claims.published  # numbers of a paper, by the id of the claim that they belong to


def collect(records: str | Path, experiment: str = "") -> record.Collection:
    """Records of one experiment (default: of all), of a folder that is absolute or relative to the repository root.
    Prints which files should have been records and are not."""
    found = kept(records, experiment)
    for problem in found.problems:
        print(f"not used: {problem}")
    return found


def kept(records: str | Path, experiment: str = "") -> record.Collection:
    """The same without a word. A notebook's figures ask again and again; files that changed meanwhile are read anew."""
    folder = paths.root() / records / experiment
    return _collected(folder, tuple(map(_state, sorted(folder.rglob("*")))))


@functools.lru_cache(maxsize=64)
def _collected(folder: Path, state: tuple[tuple[Path, int, int], ...]) -> record.Collection:
    return stored.collect(folder)


def _state(path: Path) -> tuple[Path, int, int]:
    """What changes with a file: its contents, or who may read it."""
    try:
        found = path.stat()
    except OSError:  # a link to nothing, say, which is no record
        return path, 0, 0
    return path, found.st_ctime_ns, found.st_size


def older_code(marks: Iterable[bool]) -> str:
    """What to say of runs of which some are by older code; empty where none is."""
    marks = list(marks)
    if not any(marks):
        return ""
    if len(marks) == 1:
        of_them = "the one run is"
    else:
        which = f"all {len(marks)} runs" if all(marks) else f"{sum(marks)} of {len(marks)} runs"
        of_them = f"{which} {'are' if sum(marks) > 1 else 'is'}"
    return f"{of_them} by older code; a new run may differ."


def _table(found: Mapping[Path, record.Record], experiment: str) -> pd.DataFrame:
    """Finished runs, a row each. Metrics and conditions that older records lack stay unknown."""
    table = record.frame(found)
    if table.empty:
        return table
    table["older_code"] = table.path.isin(provenance.older(found))
    table["start"] = [run.provenance.start for run in found.values()]
    known = experiments.get(experiment)
    absent = dict.fromkeys([*known.metrics.units(), *known.conditions], math.nan)
    table = table[table.status == "ok"].reset_index(drop=True)
    return table.assign(**{name: value for name, value in absent.items() if name not in table})


def not_run(records: str | Path, experiment: str) -> pd.DataFrame | None:
    """Failed and skipped runs of one experiment with `cause` and `detail`. None, which shows as nothing, without any."""
    bad = {path: run for path, run in collect(records, experiment).records.items() if run.status != "ok"}
    return record.frame(bad).assign(detail=[run.detail for run in bad.values()]) if bad else None


def series(table: pd.DataFrame) -> pd.DataFrame:
    """Parquet series of some `runs`, concatenated; each row carries its run's point fields, conditions and metrics.
    Prints which could not be read."""
    parts = []
    for row in table.to_dict("records"):
        try:
            part = record.read_series(row["path"])
        except record.RecordError as error:
            print(f"not used: {error}")
            continue
        parts.append(part.assign(**{key: value for key, value in row.items() if key not in part.columns}))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


class NothingToShow(Exception):
    """The records at hand cannot answer the figure's question; the message says what is missing."""


@dataclass(frozen=True)
class Data:
    """The records of one folder, as tables. `folder`: absolute, or relative to the repository root.

    `used`: of a figure, the runs that it draws: when each began, and whether it is by older code; its stamp says so.
    These are all that it asked for, or those that it then names (`only`), and those that its samples rest on."""

    folder: str | Path
    used: dict[Path, tuple[datetime, bool]] | None = None
    _kept: dict[str, Runs] = field(default_factory=dict, init=False, repr=False, compare=False)  # by experiment

    def all_runs(self, experiment: str) -> pd.DataFrame:
        """Finished runs of an experiment, a row each: path, repeat, seed, evidence, point fields, conditions, metrics,
        and whether they are by `older_code`, which is printed where no figure says so. May be empty."""
        return self._noted(_table(self._records(experiment), experiment), experiment)

    def runs(self, experiment: str, **where: Any) -> pd.DataFrame:
        """Finished runs of an experiment (as `all_runs`), of which the columns in `where` have this value, or one of a list.
        NothingToShow where there is none."""
        table = _table(self._records(experiment), experiment)
        missing = f"No record of a finished {experiment} run"
        if table.empty:
            raise NothingToShow(f"{missing}.")
        for column, value in where.items():
            table = table[table[column].isin(value if isinstance(value, list) else [value])]
        if table.empty:
            raise NothingToShow(f"{missing} with {', '.join(f'{column} {value}' for column, value in where.items())}.")
        return self._noted(table, experiment)

    def _noted(self, table: pd.DataFrame, experiment: str) -> pd.DataFrame:
        """The table, its runs noted for the stamp of a figure; in a notebook it has none, so a line is printed."""
        if table.empty:
            return table
        if self.used is not None:
            self.used.update(zip(table.path, zip(table.start, table.older_code, strict=True), strict=True))
        elif words := older_code(table.older_code):
            print(f"{experiment}: {words}")
        return table

    def only(self, *tables: pd.DataFrame) -> None:
        """Of the runs asked for so far, only those of `tables` are drawn; of experiments that no table is of, all."""
        if self.used is not None:
            drawn = {path for table in tables if len(table) for path in table.path}
            folders = {path.parent for path in drawn}
            for path in [path for path in self.used if path.parent in folders and path not in drawn]:
                del self.used[path]

    def sample(self, experiment: str, metric: str, where: Mapping[str, Any], **how: Any) -> Sample | None:
        """What runs say of a number, read as a claim reads it: its value, its interval, and each run or pair of runs.

        `how`: further fields of `repro.claims.reading.Reading` (`over`, `sampled`, `runs`, `columns`, ...). None where
        the records do not say it."""
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in where.items()}  # numpy's
        asked = Reading(experiment=experiment, metric=metric, where=plain, **how)
        defaults = experiments.get(experiment).defaults
        found = read_sample(asked, self._records(experiment), lambda run: False, defaults=defaults)
        return self._number(found)

    def of_claim(self, claim: str) -> Sample | None:
        """The number of a claim of `config/claims.yaml`, as its verdict has it; None where the records do not say it."""
        [read] = [each for each in claims.load() if each.id == claim and each.value]
        return self._number(claims.sample(read, self._records(read.value.experiment)))

    def _number(self, found: object) -> Sample | None:
        """A sample with a finite value, whose runs are noted."""
        if not isinstance(found, Sample) or not math.isfinite(found.value):
            return None
        if self.used is not None:
            older = provenance.older(found.runs)
            self.used.update({path: (run.provenance.start, path in older) for path, run in found.runs.items()})
        return found

    def ratio(self, experiment: str, metric: str, slow: pd.Series, fast: pd.Series) -> Sample | None:
        """How many times `metric` of the point of run `slow` is that of `fast`'s: pairs of one occasion, as a claim's."""
        one, other = (_point(experiment, run) for run in (slow, fast))
        over = {name: value for name, value in other.items() if value != one[name]}
        where = _unusual(experiment, one) | {name: one[name] for name in over}
        if not over or None in (*over.values(), *where.values()):
            return None
        return self.sample(experiment, metric, where, over=over, sampled="occasions")

    def of_point(self, experiment: str, metric: str, run: pd.Series, **how: Any) -> Sample | None:
        """The number of all runs of the point of `run`, as a claim takes it over occasions."""
        where = _unusual(experiment, _point(experiment, run))
        return self.sample(experiment, metric, where, sampled="occasions", **how)

    def _records(self, experiment: str) -> Runs:
        if experiment not in self._kept:
            self._kept[experiment] = collect(self.folder, experiment).records
        return self._kept[experiment]


def _point(experiment: str, run: pd.Series) -> dict[str, Any]:
    """Point of a row of a table, but its seed, as it stands in a record; None for what the table does not know."""
    names = experiments.get(experiment).parameters.model_fields.keys() - {"seed"}
    values = {name: run[name].item() if hasattr(run[name], "item") else run[name] for name in names}
    return {name: None if value != value else value for name, value in values.items()}  # nan is not itself


def _unusual(experiment: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a point that do not have their default; older records lack fields that have it."""
    usual = experiments.get(experiment).defaults
    return {name: value for name, value in point.items() if value is not None and value != usual[name]}
