"""Notebooks: clean in git, strict about parameters, showing exactly their figures, with records and without."""

import builtins
import importlib.util
import inspect
import json
import os
import re
from pathlib import Path

import nbformat
import papermill
import pytest
from attack.record_files import copies, shipped
from IPython.display import display
from nbclient.exceptions import DeadKernelError

from repro import paths
from repro.report import figures, notebooks
from repro.report.figures import base

RECORDS = "results/reference/laptop-2core/records"
NOTEBOOKS = sorted(path.stem for path in (paths.root() / "notebooks").glob("*.ipynb"))


def code(name: str) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(paths.root() / f"notebooks/{name}.ipynb", as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def run(name: str, **parameters) -> None:
    """Run a notebook's cells in this process, with parameters where papermill puts them."""
    namespace = {"__builtins__": vars(builtins) | {"display": display}}
    for cell in code(name):
        exec(compile(cell.source, name, "exec"), namespace)
        if "parameters" in cell.metadata.get("tags", []):
            namespace |= parameters


LOADED = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//|import\(?["' ]+https?:""")


def test_an_exported_notebook_loads_nothing():
    """Not even with a formula, or a diagram, for which nbconvert would name a server."""
    cells = [nbformat.v4.new_markdown_cell("$x^2$"), nbformat.v4.new_code_cell("1")]
    html = notebooks.html(nbformat.v4.new_notebook(cells=cells))
    assert "<title>" in html and not LOADED.findall(html) and "cdnjs" not in html and "unpkg" not in html
    assert LOADED.findall('<script src="https://x.y/z.js">')


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_helpers_are_out_of_sight(name):
    """The story comes first, and no cell defines a function."""
    cells = nbformat.read(paths.root() / f"notebooks/{name}.ipynb", as_version=4).cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert not [cell for cell in code(name) if re.search(r"^\s*(def|class) ", cell.source, re.M)]
    lines = [len(cell.source.splitlines()) for cell in code(name)]
    assert max(lines) <= 6
    first = next(place for place, cell in enumerate(code(name)) if "figures.show(" in cell.source)
    assert sum(lines[: first + 1]) <= 16  # up to the first figure


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_runs_alone_from_its_own_folder(name, tmp_path):
    """As Jupyter starts it."""
    source, executed = paths.root() / f"notebooks/{name}.ipynb", tmp_path / "executed.ipynb"
    options = {"progress_bar": False, "cwd": str(paths.root() / "notebooks")}
    papermill.execute_notebook(str(source), str(executed), {"output": str(tmp_path / "figures")}, **options)
    assert {path.stem for path in (tmp_path / "figures").glob("*.png")} >= set(figures.NOTEBOOKS[name].figures)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_only_the_package_reads_files(name):
    """Cells import nothing else, and name no other path than that of the records: the folder they run in is the same."""
    text = "\n".join(cell.source for cell in code(name))
    imported = re.findall(r"^\s*(?:from|import) (\S+)", text, re.M)
    assert imported and all(module.split(".")[0] == "repro" for module in imported)
    assert not re.findall(r"""open\(|read_|["'][^"']*/[^"']*["']""", text.replace(f'"{RECORDS}"', ""))


@pytest.fixture(autouse=True)
def closed():
    yield
    base.plt.close("all")


def test_every_notebook_has_a_title():
    assert set(NOTEBOOKS) == set(figures.NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_without_outputs_and_with_one_parameters_cell(name):
    cells = code(name)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in cells) == 1
    known = papermill.inspect_notebook(str(paths.root() / f"notebooks/{name}.ipynb"))
    assert set(known) == {"records", "output"}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_shows_exactly_its_figures(name):
    text = "\n".join(cell.source for cell in code(name))
    assert re.findall(r'figures\.show\(\s*"(\w+)", records, output', text) == list(figures.NOTEBOOKS[name].figures)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_table_is_a_function_with_its_line(name):
    """A cell calls it; above it stands what it shows."""
    called = re.findall(r"tables\.show\(of\.(\w+), records", "\n".join(cell.source for cell in code(name)))
    if not called:  # a notebook of figures alone
        assert importlib.util.find_spec(f"repro.report.figures.tables.{name}") is None
        return
    module = importlib.import_module(f"repro.report.figures.tables.{name}")
    own = {key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    assert set(called) == {key for key in own if not key.startswith("_")}
    assert all(inspect.getdoc(getattr(module, key)).endswith(".") for key in called)


def test_a_notebook_runs_in_the_kernel_of_this_environment_and_one_that_is_killed_is_told(tmp_path, monkeypatch):
    seen = {}

    def killed(*paths, **options):
        seen.update(os.environ)
        raise DeadKernelError("Kernel died")

    monkeypatch.setenv("JUPYTER_PATH", "/kernels/of/others")
    monkeypatch.setattr(papermill, "execute_notebook", killed)
    with pytest.raises(notebooks.CellError, match="its kernel was killed"):
        notebooks.execute("claims", tmp_path, {})
    assert seen["JUPYTER_PREFER_ENV_PATH"] == "1" and "JUPYTER_PATH" not in seen
    assert os.environ["JUPYTER_PATH"] == "/kernels/of/others"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_unknown_parameter_is_refused_by_the_notebook_too(name):
    """papermill itself only warns."""
    with pytest.raises(ValueError, match="unknown notebook parameter recrods; known: output, records"):
        run(name, recrods="x")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_without_any_record_every_figure_says_so(tmp_path, monkeypatch, name):
    """No record must not end in a traceback, and not in an empty panel either. `sarathi` draws the shipped figures, too."""
    monkeypatch.setattr(base, "STYLE", base.STYLE | {"savefig.dpi": 30})
    if name != "sarathi":
        monkeypatch.setattr(base, "draw_shipped", lambda *_, **__: None)
    run(name, records=str(tmp_path / "records"), output=str(tmp_path / "figures"))
    for figure in figures.NOTEBOOKS[name].figures:
        assert (tmp_path / f"figures/{figure}.png").exists(), figure


def _odd(path: Path, number: float) -> None:
    """The same number for all metrics of a record."""
    document = json.loads(path.read_text())
    for metric in document["metrics"].values():
        metric["value"] = number
    path.write_text(json.dumps(document))


@pytest.mark.exhaustive
@pytest.mark.parametrize("harm", ["damaged or 1e308", "0 everywhere"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_damaged_and_odd_records_end_no_notebook(tmp_path, monkeypatch, capsys, name, harm):
    """Of every experiment some records are cut, without their series, or hold an odd number."""
    monkeypatch.setattr(base, "STYLE", base.STYLE | {"savefig.dpi": 30})
    monkeypatch.setattr(base, "draw_shipped", lambda *_, **__: None)
    for experiment in {read for entry in figures.NOTEBOOKS[name].figures for read in figures.entry(entry).reads}:
        made = copies(tmp_path / "records", shipped(experiment, 8))
        for index, path in enumerate(made):
            if harm == "0 everywhere":
                _odd(path, 0.0)
            elif index % 4 == 1:
                path.write_bytes(path.read_bytes()[:300])
            elif index % 4 == 2:
                path.with_suffix(".parquet").unlink(missing_ok=True)
            elif index % 4 == 3:
                _odd(path, 1e308)
    run(name, records=str(tmp_path / "records"), output=str(tmp_path / "figures"))
    assert "damaged" not in harm or "not used: " in capsys.readouterr().out
    for figure in figures.NOTEBOOKS[name].figures:
        assert (tmp_path / f"figures/{figure}.png").exists(), figure


@pytest.mark.slow
def test_in_a_kernel(tmp_path):
    html = notebooks.execute("sarathi", tmp_path, {"output": str(tmp_path / "figures")})
    cells = nbformat.read(tmp_path / "sarathi.ipynb", 4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == len(figures.NOTEBOOKS["sarathi"].figures)
    text = html.read_text()
    assert all(claim in text for claim in figures.entry("sarathi_throughput").claims)  # verdicts beside the figure
    assert not LOADED.findall(text)  # opens without a network
