"""Links from a page to files near it: relative, so that they hold wherever the folder is moved; none to what is not there."""

import json
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

from repro import paths
from repro.report import figures


@dataclass(frozen=True)
class Link:
    """`address`: empty where there is no such file, so that only the text stands."""

    text: str
    address: str


def to(path: Path, page: Path, text: str = "") -> Link:
    """A file, from the page at `page`; `text` is its name without suffix where none is given."""
    there = path.resolve()
    address = quote(os.path.relpath(there, page.resolve().parent)) if there.is_file() else ""
    return Link(text or path.stem, address)


def section(figure: str, page: Path) -> Link:
    """The section of a notebook that shows a figure: of its executed copy beside the page, else its source."""
    name = figures.entry(figure).notebook
    heading, cell = _section(name, figure)
    text = ", ".join(filter(None, [figures.NOTEBOOKS[name].title, heading]))
    executed = to(page.parent / "notebooks" / f"{name}.html", page, text)
    if executed.address:
        return Link(text, f"{executed.address}#{quote(cell)}" if cell else executed.address)
    return to(_source(name), page, text)


def _source(notebook: str) -> Path:
    return paths.root() / "notebooks" / f"{notebook}.ipynb"


@cache
def _cells(path: Path) -> list[dict[str, str]]:
    """Kind, id and source of the cells of a notebook; none where there is no such file."""
    cells = json.loads(path.read_text("utf-8"))["cells"] if path.is_file() else []
    return [{"kind": c["cell_type"], "id": c.get("id", ""), "source": "".join(c["source"])} for c in cells]


def _section(notebook: str, figure: str) -> tuple[str, str]:
    """The heading above the cell that shows a figure, and the id that nbconvert gives the heading's cell in HTML."""
    heading, place = "", ""
    for cell in _cells(_source(notebook)):
        if cell["kind"] == "markdown" and (found := re.findall(r"^##+ +(.+)$", cell["source"], re.MULTILINE)):
            heading, place = found[-1], cell["id"]
        elif cell["kind"] == "code" and re.search(rf"['\"]{figure}['\"]", cell["source"]):
            place = place or cell["id"]
            return heading, f"cell-id={place}" if place else ""
    return "", ""
