"""Run a notebook of `notebooks/` with papermill, and keep what it shows: executed copy, HTML, figures."""

import logging
from pathlib import Path
from typing import Any

import nbformat
import papermill
from nbconvert import HTMLExporter

from repro import paths
from repro.files import replacing


def execute(name: str, out: Path, values: dict[str, Any]) -> Path:
    """Run `notebooks/NAME.ipynb` with `values`; return the path of its HTML in `out`.

    An unknown notebook or parameter is a ValueError that lists the known ones. When a cell fails, the executed copy is
    kept for reading and papermill's error is raised.
    """
    folder = paths.root() / "notebooks"
    source = folder / f"{name}.ipynb"
    if not source.exists():
        raise ValueError(f"no notebook {name!r}, known: {', '.join(sorted(p.stem for p in folder.glob('*.ipynb')))}")
    known = set(papermill.inspect_notebook(str(source)))
    if unknown := sorted(values.keys() - known):
        raise ValueError(f"{source}: unknown parameter {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    out.mkdir(parents=True, exist_ok=True)
    executed = out / f"{name}.ipynb"
    logging.getLogger("papermill").setLevel(logging.ERROR)
    papermill.execute_notebook(
        str(source), str(executed), values, kernel_name="python3", progress_bar=False, cwd=str(paths.root())
    )
    html, _ = HTMLExporter(embed_images=True).from_notebook_node(nbformat.read(executed, as_version=4))
    with replacing(out / f"{name}.html") as temporary:
        temporary.write_text(html)
    return out / f"{name}.html"
