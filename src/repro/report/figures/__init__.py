"""Every figure: the notebook that tells its story, the experiments it reads, the claims it shows (`catalogue.toml`).

A figure is the function of its name in a module of this package; `base.draw` draws it. Who asks the catalogue what a
figure needs loads no plotting library.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from repro import experiments
from repro.claims.document import Paper

CATALOGUE = Path(__file__).with_name("catalogue.toml")


@dataclass(frozen=True)
class Notebook:
    """`title` of what it is about; `figures`: rows of the catalogue by name, in the order of its cells; `paper`: the
    number at arXiv of the paper, where it is about one."""

    title: str
    figures: dict[str, dict[str, Any]]
    paper: str = ""


@dataclass(frozen=True)
class Entry:
    """`module`: of the figure's function, in this package. `reads`: ids of experiments, whose records the figure shows.
    `claims`: ids of claims that it is evidence for. `asks`: the question that it answers."""

    notebook: str
    module: str
    reads: Sequence[str] = field(default_factory=experiments.names)
    claims: Sequence[str] = ()
    asks: str = ""


NOTEBOOKS = {name: Notebook(**section) for name, section in tomllib.loads(CATALOGUE.read_text()).items()}
FIGURES = {
    figure: Entry(**{"notebook": name, "module": name} | row)
    for name, notebook in NOTEBOOKS.items()
    for figure, row in notebook.figures.items()
}


def name_of(paper: Paper) -> str:
    """A paper in a word or two: its notebook's title, else how its own begins."""
    of_notebooks = {notebook.paper: notebook.title for notebook in NOTEBOOKS.values() if notebook.paper}
    return of_notebooks.get(paper.id, paper.title.split(":")[0])


def entry(name: str) -> Entry:
    """A figure's row of the catalogue; ValueError lists the known ones."""
    if name not in FIGURES:
        raise ValueError(f"no figure {name!r}{experiments.closest(name, FIGURES)}; known: {', '.join(FIGURES)}")
    return FIGURES[name]
