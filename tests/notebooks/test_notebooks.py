"""Notebooks: clean in git, strict about parameters, and alone with the shipped records."""

import nbformat
import papermill
import pytest

from repro import paths
from repro.report import figures, notebooks

NOTEBOOKS = sorted(path.stem for path in (paths.root() / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_without_outputs_and_with_one_parameters_cell(name):
    notebook = nbformat.read(paths.root() / f"notebooks/{name}.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebooks.parameters(paths.root() / f"notebooks/{name}.ipynb") == {"records", "output"}


def test_unknown_parameter_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"unknown parameter recrods; known: output, records"):
        notebooks.execute("claims", tmp_path, {"recrods": "x"})
    with pytest.raises(ValueError, match="known: claims, exflow"):
        notebooks.execute("claim", tmp_path, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_plain_papermill_refuses_unknown_parameters_too(tmp_path, name):
    with pytest.raises(papermill.PapermillExecutionError, match="unknown notebook parameter recrods"):
        papermill.execute_notebook(
            str(paths.root() / f"notebooks/{name}.ipynb"),
            str(tmp_path / "out.ipynb"),
            {"recrods": "x"},
            progress_bar=False,
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_without_any_record_every_figure_says_so(tmp_path, name):
    """No record must not end in a traceback, and not in an empty panel either."""
    (tmp_path / "records").mkdir()
    html = notebooks.execute(
        name, tmp_path, {"records": str(tmp_path / "records"), "output": str(tmp_path / "figures")}
    )
    assert html.stat().st_size > 10_000
    for figure in figures.of_notebook(name):
        assert (tmp_path / f"figures/{figure}.png").exists(), figure
