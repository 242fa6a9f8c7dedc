"""Run a notebook of `notebooks/` with papermill, and keep what it shows: executed copy, HTML, figures."""

import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from nbconvert import HTMLExporter

from repro import experiments, files, paths

# A script that is loaded, or whose text loads one.
_FROM_SERVERS = re.compile(
    r"<script(?:(?!</script>).)*(?:cdnjs\.cloudflare|unpkg\.com)(?:(?!</script>).)*</script>", re.DOTALL
)


class CellError(RuntimeError):
    """A cell of a notebook that failed: which, with what, and where the executed copy is."""


def execute(name: str, out: Path, values: dict[str, Any]) -> Path:
    """Run `notebooks/NAME.ipynb` with `values`; return the path of its HTML in `out`.

    An unknown notebook or parameter is a ValueError that lists the known ones; OSError where `out` cannot be written.
    When a cell fails, the executed copy is kept for reading and CellError names it.
    """
    folder = paths.root() / "notebooks"
    known = sorted(path.stem for path in folder.glob("*.ipynb"))
    if name not in known:
        raise ValueError(f"no notebook {name!r}{experiments.closest(name, known)}; known: {', '.join(known)}")
    source, executed = folder / f"{name}.ipynb", out / f"{name}.ipynb"
    parameters = papermill.inspect_notebook(str(source)).keys()
    if unknown := sorted(values.keys() - parameters):
        raise ValueError(f"{source}: unknown parameter {', '.join(unknown)}; known: {', '.join(sorted(parameters))}")
    files.try_writing(executed)
    logging.getLogger("papermill").setLevel(logging.ERROR)
    options = {"kernel_name": "python3", "progress_bar": False, "cwd": str(paths.root())}
    # The kernel of this environment, whatever the user or the system has under its name.
    own = {name: value for name, value in os.environ.items() if name != "JUPYTER_PATH"} | {
        "JUPYTER_PREFER_ENV_PATH": "1"
    }
    try:
        with mock.patch.dict(os.environ, own, clear=True):
            papermill.execute_notebook(str(source), str(executed), values, **options)
    except papermill.PapermillExecutionError as error:
        raise CellError(f"{executed}: cell {error.cell_index}: {error.ename}: {error.evalue}") from error
    except DeadKernelError as error:
        raise CellError(f"{executed}: its kernel was killed, perhaps for want of memory") from error
    with files.replacing(out / f"{name}.html") as temporary:
        temporary.write_text(html(nbformat.read(executed, as_version=4)), "utf-8")
    return out / f"{name}.html"


def html(notebook: nbformat.NotebookNode) -> str:
    """The notebook as one page that loads nothing: pictures lie in it. nbconvert's scripts for widgets, formulas and
    diagrams, which these notebooks do not have, would come from servers of others."""
    page, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
    for script in _FROM_SERVERS.findall(page):
        page = page.replace(script, "")
    return page
