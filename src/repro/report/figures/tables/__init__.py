"""Tables of the notebooks: a function of `Data` each, whose docstring is the line above it, and `show`, which a cell
calls."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Markdown, display
from pandas.io.formats.style import Styler

from repro.report.figures.data import Data, NothingToShow


def show(table: Callable[..., pd.DataFrame | Styler], records: str | Path, **options: Any) -> None:
    """In a notebook: a table of the records of a folder, or what they lack for it."""
    try:
        with pd.option_context("display.max_colwidth", None):
            shown = table(Data(records), **options)
            display(Markdown(f"**{inspect.getdoc(table)}**"), shown)
    except NothingToShow as reason:
        print(f"Nothing to show. {reason}")


def rounded(table: pd.DataFrame, precision: int = 3) -> Styler:
    """For reading."""
    style = table.style.set_uuid("table").format(precision=precision, thousands=",", na_rep="–", escape="html")
    return style.format_index(escape="html")
