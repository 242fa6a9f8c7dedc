"""What every figure has in common: one style that survives black and white, the evidence stamp, where it is saved.

A figure is a function `name(data, **options) -> Drawing` with a row in `catalogue.toml`. It raises NothingToShow where
the records cannot answer its question. Notebooks call `show`, the command line calls `draw`.
"""

import importlib
import json
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import Image, display
from matplotlib.figure import Figure
from pydantic import TypeAdapter, ValidationError

from repro import paths
from repro.claims import registry as claims
from repro.claims import sides
from repro.experiments import stored
from repro.files import replacing
from repro.report import figures
from repro.report.figures.data import Data, NothingToShow, kept, older_code
from repro.report.figures.data import not_run as not_run  # for notebooks

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


def check_parameters(namespace: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse parameters that the notebook does not have: a ValueError that lists the known ones. papermill only warns.

    `namespace` is the notebook's globals() before its first import other than `figures`.
    """
    kernel = {"In", "Out", "exit", "quit", "open", "get_ipython", "figures"}
    own = {name for name in namespace if not name.startswith("_")} - kernel
    if unknown := sorted(own - set(known)):
        raise ValueError(f"unknown notebook parameter {', '.join(unknown)}; known: {', '.join(sorted(known))}")


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
    what it shows than `records` do. None where they do not, and where they cannot answer its question; then that of an
    earlier run goes."""
    folder = sides.shipped_folder() / "records"
    reads = figures.entry(name).reads
    folders = paths.root() / records, folder
    own, shipped = ({p.relative_to(each) for name in reads for p in (each / name).glob("*.json")} for each in folders)
    if not shipped <= own:  # names change with new parameters, points do not
        found = ([kept(each, name).records for name in reads] for each in folders)
        own, shipped = ({stored.place(run) for records in each for run in records.values()} for each in found)
    path = output and Path(output) / "shipped" / name
    make, asks = _prepared(name, options), figures.entry(name).asks
    mark = f"Shipped records ({folder.parent.name}), not of this run. "
    if not shipped <= own:
        with suppress(NothingToShow), _odd_records(name):
            return _finished(_drawn(make, folder), path, (".png",), asks, mark)
    for suffix in (".png", ".json") if path else ():
        (paths.root() / path).with_suffix(suffix).unlink(missing_ok=True)
    return None


def _drawn(make: Callable[[Data], Drawing], records: str | Path) -> Drawing:
    """The figure, and how many runs it reads, and how many of these are by older code."""
    used: dict[Path, tuple[datetime, bool]] = {}
    drawing = make(Data(records, used))
    parts = [_count(used), older_code(old for _, old in used.values()).capitalize()]
    return replace(drawing, n=" ".join(filter(None, parts)))


def _count(used: Mapping[Path, tuple[datetime, bool]]) -> str:
    """How many runs a figure has read, and on which days they were made."""
    if not used:
        return ""
    days = sorted(start.date() for start, _ in used.values())
    when = f"of {days[0]}" if days[0] == days[-1] else f"of {days[0]} to {days[-1]}"
    return f"From {len(used)} run{'s' * (len(used) > 1)} {when}."


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
    """Verdicts of the claims that figure `name` is evidence for: a row for each but those *not run*,
    with columns claim, about, paper, ours, agreement, setting. ValueError for a figure that does not exist."""
    entry = figures.entry(name)
    shown = [claim for claim in claims.load() if claim.id in entry.claims]
    reads = entry.reads if shown else []
    found = [kept(records, experiment).records for experiment in reads]
    judged = claims.evaluate(shown, {path: run for runs in found for path, run in runs.items()})
    rows = [
        (claim.id, claim.title, *claims.numbers(verdict), verdict.agreement, verdict.scope or "–")
        for claim, verdict in zip(shown, judged, strict=True)
    ]
    return pd.DataFrame(rows, columns=["claim", "about", "paper", "ours", "agreement", "setting"]).query(
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
        print(f"Without a verdict (`repro claims` says why): {', '.join(missing)}")
    if (shipped := draw_shipped(name, records, output, **options)) is not None:
        _display(shipped, output and Path(output) / "shipped", name)


def _display(figure: Figure, output: str | Path | None, name: str) -> None:
    """The saved picture where there is one: drawing it again takes as long as the figure."""
    width = int(110 * figure.get_size_inches()[0])
    if output is None:
        display(figure)
    else:
        texts = json.loads((paths.root() / output / f"{name}.json").read_text("utf-8"))
        told = " ".join(texts[key] for key in ("asks", "caption", "n"))
        display(Image(paths.root() / output / f"{name}.png", width=width, alt=told))
    plt.close(figure)
