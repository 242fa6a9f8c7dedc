"""What every figure has in common: reading records, one style that survives black and white, the evidence stamp.

A figure is a function `name(data, **options) -> Drawing` with a row in `catalogue.toml`. It raises NothingToShow where
the records cannot answer its question. Notebooks call `show`, the command line calls `draw`.
"""

import importlib
import json
import math
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_type_hints

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import Image, display
from matplotlib.figure import Figure
from pydantic import TypeAdapter, ValidationError

from repro import experiments, paths
from repro.claims import registry as claims
from repro.claims.reading import Reading
from repro.claims.sample import Runs, Sample
from repro.claims.sample import read as read_sample
from repro.experiments import stored
from repro.files import replacing
from repro.plan import config
from repro.records import provenance, record, statistics
from repro.report import figures

PALETTE = ["#1b6ca8", "#e08e0b", "#3a9d5d", "#b03a5b", "#6b4fa0", "#555555"]  # distinct in luminance as well as hue
HATCHES = ["", "///", "...", "xxx", "\\\\\\", "++"]
MARKERS = ["o", "s", "^", "D", "v", "P"]
LINE_STYLES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1))]
STYLE = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "figure.constrained_layout.use": True,
    "hatch.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "repro",
}
paper = claims.published  # numbers of a paper, by the id of the claim that they belong to


def check_parameters(namespace: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse parameters that the notebook does not have: a ValueError that lists the known ones. papermill only warns.

    `namespace` is the notebook's globals() before its first import other than `figures`.
    """
    kernel = {"In", "Out", "exit", "quit", "open", "get_ipython", "figures"}
    own = {name for name in namespace if not name.startswith("_")} - kernel
    if unknown := sorted(own - set(known)):
        raise ValueError(f"unknown notebook parameter {', '.join(unknown)}; known: {', '.join(sorted(known))}")


def collect(records: str | Path, experiment: str = "") -> record.Collection:
    """Records of one experiment (default: of all), of a folder that is absolute or relative to the repository root.
    Prints which files should have been records and are not."""
    found = stored.collect(paths.root() / records / experiment)
    for problem in found.problems:
        print(f"not used: {problem}")
    return found


def runs(records: str | Path, experiment: str) -> pd.DataFrame:
    """Finished runs of one experiment, a row each: path, repeat, seed, evidence, point fields, conditions, metrics, and
    whether they are by `older_code`, which is printed as well. May be empty."""
    return _told(_runs(records, experiment), experiment)


def _told(table: pd.DataFrame, experiment: str) -> pd.DataFrame:
    """`runs` for a table in a notebook: below it stands no stamp, so a line is printed."""
    if len(table) and (words := older_code(table.older_code)):
        print(f"{experiment}: {words}")
    return table


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
    return f"{of_them} by older code than this; run again, they may give other numbers."


def _runs(records: str | Path, experiment: str) -> pd.DataFrame:
    """Older records lack fields, which ran with what is the default now, and metrics, which stay unknown."""
    found = collect(records, experiment)
    table = record.frame(found.records)
    if table.empty:
        return table
    table["older_code"] = table.path.isin(provenance.older(found.records))
    table["start"] = [run.provenance.start for run in found.records.values()]
    known = experiments.get(experiment)
    absent = {name: field.default for name, field in known.parameters.model_fields.items()}
    absent |= dict.fromkeys([*known.metrics.units(), *known.conditions], math.nan)
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


# --- drawing one figure --------------------------------------------------------------------------------------------


class NothingToShow(Exception):
    """The records at hand cannot answer the figure's question; the message says what is missing."""


@dataclass(frozen=True)
class Data:
    """The records of one folder, as tables. `folder`: absolute, or relative to the repository root.

    `used`: of a figure, the runs that it draws: when each began, and whether it is by older code; its stamp says so.
    These are all that it asked for, or those that it then names (`only`), and those that its samples rest on."""

    folder: str | Path
    used: dict[Path, tuple[datetime, bool]] | None = None

    def all_runs(self, experiment: str) -> pd.DataFrame:
        """Finished runs of an experiment (see `runs`); may be empty."""
        return self._noted(_runs(self.folder, experiment), experiment)

    def runs(self, experiment: str, **where: Any) -> pd.DataFrame:
        """Finished runs of an experiment (see `runs`), of which the columns in `where` have this value, or one of a list.
        NothingToShow where there is none."""
        table = _runs(self.folder, experiment)
        missing = f"No record of a finished {experiment} run"
        if table.empty:
            raise NothingToShow(f"{missing}.")
        for column, value in where.items():
            table = table[table[column].isin(value if isinstance(value, list) else [value])]
        if table.empty:
            raise NothingToShow(f"{missing} with {', '.join(f'{column} {value}' for column, value in where.items())}.")
        return self._noted(table, experiment)

    def _noted(self, table: pd.DataFrame, experiment: str) -> pd.DataFrame:
        if self.used is None:
            return _told(table, experiment)
        if len(table):
            self.used.update(zip(table.path, zip(table.start, table.older_code, strict=True), strict=True))
        return table

    def only(self, *tables: pd.DataFrame) -> None:
        """Of the runs asked for so far, only those of `tables` are drawn; of experiments that no table is of, all."""
        if self.used is not None:
            drawn = {path for table in tables for path in table.path}
            folders = {path.parent for path in drawn}
            for path in [path for path in self.used if path.parent in folders and path not in drawn]:
                del self.used[path]

    def sample(self, experiment: str, metric: str, where: Mapping[str, Any], **how: Any) -> Sample | None:
        """What runs say of a number, read as a claim reads it: its value, its interval, and each run or pair of runs.

        `how`: further fields of `repro.claims.reading.Reading` (`over`, `sampled`, `runs`, `columns`, ...). None where
        the records do not say it."""
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in where.items()}  # numpy's
        asked = Reading(experiment=experiment, metric=metric, where=plain, **how)
        defaults = {name: field.default for name, field in experiments.get(experiment).parameters.model_fields.items()}
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

    @cached_property
    def _kept(self) -> dict[str, Runs]:
        return {}

    def _records(self, experiment: str) -> Runs:
        if experiment not in self._kept:
            self._kept[experiment] = stored.collect(paths.root() / self.folder / experiment).records
        return self._kept[experiment]


def _point(experiment: str, run: pd.Series) -> dict[str, Any]:
    """Point of a row of a table, but its seed, as it stands in a record; None for what the table does not know."""
    names = experiments.get(experiment).parameters.model_fields.keys() - {"seed"}
    values = {name: run[name].item() if hasattr(run[name], "item") else run[name] for name in names}
    return {name: None if value != value else value for name, value in values.items()}  # nan is not itself


def _unusual(experiment: str, point: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a point that do not have their default; older records lack fields that have it."""
    fields = experiments.get(experiment).parameters.model_fields
    return {name: value for name, value in point.items() if value is not None and value != fields[name].default}


@contextmanager
def where_recorded() -> Iterator[None]:
    """In a notebook, around the lines of a table: what the records do not hold is said instead of raised."""
    try:
        yield
    except NothingToShow as reason:
        print(f"Nothing to show. {reason}")


@dataclass(frozen=True)
class Drawing:
    """A figure, the evidence kinds of what it shows, a sentence under it, and another on its runs."""

    figure: Figure
    evidence: str
    caption: str = ""
    n: str = ""


def skip(name: str, reason: str) -> Drawing:
    """A picture that says why there is nothing to show: an empty panel would look like a result."""
    fig, axes = plt.subplots(figsize=(6, 1.8))
    axes.axis("off")
    text = textwrap.fill(f"{name}: nothing to show. {reason}", 70)
    axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=11)
    return Drawing(fig, "none")


def function(name: str) -> Callable[..., Drawing]:
    """The function of a figure; ValueError for a name that is not in the catalogue."""
    return getattr(importlib.import_module(f"{figures.__name__}.{figures.entry(name).module}"), name)


def draw(name: str, records: str | Path, output: str | Path | None = None, **options: Any) -> Figure:
    """Draw figure `name` from the records of a folder, with the options of its function, and save it as
    `output/name.png` and `.svg`, its texts as `output/name.json` (unless None). Where the records do not suffice, or
    hold what the figure cannot draw, the picture says so. ValueError for a name or an option that does not exist, and
    for a value that the option's type does not allow."""
    make, asks = _prepared(name, options), figures.entry(name).asks
    save = partial(_finished, path=output and Path(output) / name, suffixes=(".png", ".svg"), asks=asks)
    try:
        with _odd_records(name):
            return save(_drawn(make, records))
    except NothingToShow as reason:
        return save(skip(name, str(reason)), caption=f"Nothing to show. {reason}")


def draw_shipped(name: str, records: str | Path, output: str | Path | None = None, **options: Any) -> Figure | None:
    """The same figure from the shipped records, marked as such and saved in `output/shipped`, where they hold more of
    what it shows than `records` do. None where they do not, and where they cannot answer its question."""
    folder = paths.root() / "results/reference" / config.load()[0].reference / "records"
    reads = figures.entry(name).reads
    own, shipped = (
        {path.relative_to(each) for experiment in reads for path in (each / experiment).glob("*.json")}
        for each in (paths.root() / records, folder)
    )
    if shipped <= own:
        return None
    make, asks = _prepared(name, options), figures.entry(name).asks
    mark = f"Shipped records ({folder.parent.name}), not of this run. "
    try:
        with _odd_records(name):
            return _finished(_drawn(make, folder), output and Path(output) / "shipped" / name, (".png",), asks, mark)
    except NothingToShow:
        return None


def _drawn(make: Callable[[Data], Drawing], records: str | Path) -> Drawing:
    """The figure, and how many runs it reads, and how many of these are by older code."""
    data = Data(records, {})
    drawing = make(data)
    words = older_code(old for _, old in (data.used or {}).values())
    parts = [_count(data.used or {}), words[:1].upper() + words[1:]]
    return replace(drawing, n=" ".join(filter(None, parts)))


def _count(used: Mapping[Path, tuple[datetime, bool]]) -> str:
    """How many runs a figure has read, and on how many occasions they were made."""
    if not used:
        return ""
    occasions = len(set(statistics.occasions([start for start, _ in used.values()])))
    return f"From {len(used)} run{'s' * (len(used) > 1)} on {occasions} occasion{'s' * (occasions > 1)}."


@contextmanager
def _odd_records(name: str) -> Iterator[None]:
    """A value that is allowed and that figure `name` cannot draw ends neither a notebook nor a workflow."""
    try:
        yield
    except (NothingToShow, OSError):  # OSError: of the picture's file
        raise
    except Exception as error:
        reason = f"These records cannot be drawn: {type(error).__name__}: {str(error)[:200]}"
        print(f"{name}: {reason}", file=sys.stderr)
        raise NothingToShow(reason) from error


def _prepared(name: str, options: dict[str, Any]) -> Callable[[Data], Drawing]:
    """The figure's function with its options, which are taken in their types."""
    make = function(name)
    hints, checked = get_type_hints(make), {}
    known = [option for option in hints if option not in ("data", "return")]
    if unknown := sorted(options.keys() - set(known)):
        raise ValueError(f"figure {name}: no option {', '.join(unknown)}; known: {', '.join(known) or 'none'}")
    for option, value in options.items():
        try:
            checked[option] = TypeAdapter(hints[option]).validate_python(value)
        except ValidationError as error:
            raise ValueError(f"figure {name}: {option}: found {value!r}; {error.errors()[0]['msg']}") from error
    sns.set_theme(context="paper", style="whitegrid", palette=PALETTE, font_scale=1.05, rc=STYLE)
    return partial(make, **checked)


def _finished(
    drawing: Drawing, path: Path | None, suffixes: Sequence[str], asks: str, mark: str = "", caption: str = ""
) -> Figure:
    """With its question and the evidence below it, and saved (`path`: relative to the root) unless that is None.
    `caption`: in its texts in place of its own, where the picture itself says it."""
    characters = int(drawing.figure.get_size_inches()[0] * 14.5)
    said = " ".join(filter(None, [f"{mark}Evidence: {drawing.evidence}.", drawing.caption, drawing.n]))
    lines = [said, *([asks] if asks else [])]
    stamp = "\n".join(textwrap.fill(line, characters) for line in lines[::-1])
    drawing.figure.supxlabel(stamp, fontsize=8, x=0.01, ha="left", color="#333333")
    for suffix in suffixes if path else ():
        metadata = {"Date": None} if suffix == ".svg" else {"Software": None}  # same records, same bytes
        with replacing((paths.root() / path).with_suffix(suffix)) as temporary:
            # tight: what the layout did not foresee (a label wider than its axes) makes the picture larger, not clipped
            drawing.figure.savefig(temporary, format=suffix[1:], metadata=metadata, bbox_inches="tight")
    if path:
        texts = {"asks": asks, "caption": caption or drawing.caption, "evidence": drawing.evidence, "n": drawing.n}
        with replacing((paths.root() / path).with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(texts, ensure_ascii=False, indent=1), "utf-8")
    return drawing.figure


def verdicts(name: str, records: str | Path) -> pd.DataFrame:
    """Verdicts of the claims that figure `name` is evidence for: a row per claim that a record of the folder answers,
    with columns claim, about, paper, ours, agreement, scope. ValueError for a figure that does not exist."""
    entry = figures.entry(name)
    found = [stored.collect(paths.root() / records / experiment).records for experiment in entry.reads]
    shown = [claim for claim in claims.load() if claim.id in entry.claims]
    judged = claims.evaluate(shown, {path: run for runs in found for path, run in runs.items()})
    rows = [
        (claim.id, claim.title, *claims.numbers(verdict.model_dump()), verdict.agreement, verdict.scope or "–")
        for claim, verdict in zip(shown, judged, strict=True)
    ]
    return pd.DataFrame(rows, columns=["claim", "about", "paper", "ours", "agreement", "scope"]).query(
        "agreement != 'not run'"
    )


def show(name: str, records: str | Path, output: str | Path | None = None, **options: Any) -> None:
    """In a notebook: `draw` a figure, below it the `verdicts` of its claims, and where the shipped records hold more
    points, the same figure of these."""
    _display(draw(name, records, output, **options), output, name)
    if len(table := verdicts(name, records)):
        left = {"selector": "th, td", "props": "text-align: left"}
        display(table.style.set_uuid(name).hide(axis="index").set_table_styles([left]))
        if marked := claims.older_code(table.ours):
            print(marked)
    if missing := [claim for claim in figures.entry(name).claims if claim not in set(table.claim)]:
        print(f"Without a verdict, as their runs are missing: {', '.join(missing)}")
    if (shipped := draw_shipped(name, records, output, **options)) is not None:
        _display(shipped, output and Path(output) / "shipped", name)


def _display(figure: Figure, output: str | Path | None, name: str) -> None:
    """The saved picture where there is one: drawing it again takes as long as the figure."""
    width = int(110 * figure.get_size_inches()[0])
    display(figure if output is None else Image(paths.root() / output / f"{name}.png", width=width))
    plt.close(figure)
