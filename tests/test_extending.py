"""docs/extending.md: its blocks make an experiment, a paper, a claim, a figure and two platforms in a copy of the project, and its commands find them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml
from conftest import copied_project

from repro import paths
from repro.report import figures

PAGE = (paths.root() / "docs/extending.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
LAST = "All of it"
FILE = re.compile(r"^`(?P<path>[^`]+)`, (?P<where>[^\n]+)\n\n```\w+\n(?P<text>.*?)```", re.MULTILINE | re.DOTALL)
# Commands of the page in one process, for the seconds that each would take to begin
RUN_ALL = """
import json, sys
from typer.testing import CliRunner
from repro.cli import app
found = [CliRunner().invoke(app, line.split()[1:]) for line in json.load(sys.stdin)]
print(json.dumps([[each.exit_code, each.output] for each in found]))
"""


def commands(section: str, program: str) -> list[str]:
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", SECTIONS[section], re.DOTALL)).splitlines()
    return [line for line in lines if line.startswith(f"{program} ")]


def run_all(lines: list[str]) -> dict[str, str]:
    """Output by command, of which none fails."""
    found = json.loads(python("-c", RUN_ALL, input=json.dumps(lines)).splitlines()[-1])
    assert [output for code, output in found if code] == []
    return {line: output for line, (_, output) in zip(lines, found, strict=True)}


def python(*arguments: str, **options) -> str:
    found = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def put(path: Path, where: str, text: str) -> None:
    """Write a block where the page says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if where == "new:":
        assert not path.exists(), path
        path.write_text(text)
    elif where == "new, written by:":
        python("-c", text)
        assert path.exists(), path
    elif where == "at its end:":
        path.write_text(path.read_text() + text)
    else:
        line = re.fullmatch(r"below the line `(.+)`", where)
        assert line and path.read_text().count(f"\n{line[1]}\n") == 1, (path, where)
        path.write_text(path.read_text().replace(f"\n{line[1]}\n", f"\n{line[1]}\n{text}"))


def only_birthdays_in_smoke(config: Path) -> None:
    """The other experiments' points take minutes."""
    document = yaml.safe_load(config.read_text())
    for name, experiment in document["experiments"].items():
        if name != "birthday":
            experiment["tiers"].pop("smoke", None)
    config.write_text(yaml.safe_dump(document))


def shorten(notebook: Path) -> None:
    """Pictures without content in the place of figures, which take minutes and are not of the page."""
    names = [f"{name}.png" for name in figures.NOTEBOOKS[notebook.stem].figures]
    draw = f"for name in {names}:\n    path = Path(output, name)\n    path.parent.mkdir(parents=True, exist_ok=True)\n"
    cells = [
        nbformat.v4.new_code_cell('records = ""\noutput = ""', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "from pathlib import Path\n\nfrom PIL import Image\n\n" + draw + '    Image.new("L", (8, 8)).save(path)'
        ),
    ]
    metadata = nbformat.read(notebook, 4).metadata  # its kernel
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), notebook)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = paths.root()
    with copied_project(tmp_path_factory.mktemp("extended")) as folder, pytest.MonkeyPatch.context() as patch:
        for name in ("src", "docs"):
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("*.egg-info", "*.nb[ci]"))
        for name in ("README.md", "Makefile", "CITATION.cff", "pyproject.toml", "tests/claims/test_registry.py"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
        patch.setenv("PYTHONPATH", str(folder / "src"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        for block in FILE.finditer(PAGE):
            put(folder / block["path"], block["where"], block["text"])
        only_birthdays_in_smoke(folder / "config/config.yaml")
        for name in figures.NOTEBOOKS:
            shorten(folder / f"notebooks/{name}.ipynb")
        yield folder


@pytest.fixture(scope="module")
def said(project):
    """What the commands of every section but the last print."""
    return run_all([line for section in SECTIONS if section != LAST for line in commands(section, "repro")])


def test_every_block_and_command_of_the_page_is_used():
    kinds = re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)
    assert len(kinds) == len(list(FILE.finditer(PAGE))) + kinds.count("sh")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    used = [*(line for name in SECTIONS for line in commands(name, "repro")), *commands("A figure", "snakemake")]
    assert lines and sorted(lines) == sorted(used)


def test_the_point_is_in_the_plan_and_runs(project, said):
    assert re.search(r"people23.*to run", said["repro plan --tier smoke --points"])
    (record,) = (project / "results/by-hand/records/birthday").glob("people23-*.json")
    assert json.loads(record.read_text())["metrics"]["shared"]["value"] == pytest.approx(0.5073, abs=1e-4)


def test_the_claim_is_judged(said):
    (output,) = (text for line, text in said.items() if line.startswith("repro claims BD"))
    assert re.search(r"BD-1.*reproduced", output)


def test_the_paper_is_cited_and_its_rows_are_listed(project):
    cited = yaml.safe_load((project / "CITATION.cff").read_text())["references"]
    assert {"type": "other", "value": "arXiv:0000.00000"} in cited[0]["identifiers"]
    (rows,) = re.findall(r"^ROWS = \{(.*?)\}", (project / "tests/claims/test_registry.py").read_text(), re.M | re.S)
    assert '"BD-1"' in rows and '"ZT-1"' in rows


def test_the_figure_is_drawn(project, said):
    picture = (project / "results/by-hand/figures/birthday_chance.svg").read_text()
    assert "chance that two share" in picture and "nothing to show" not in picture


def test_the_workflow_has_it(project):
    (line,) = commands("A figure", "snakemake")
    output = python("-m", *line.split())
    assert re.search(r"^birthday_notebook +1$", output, re.MULTILINE) and "birthday-" in output


def test_the_platforms_have_plans(said):
    assert said["repro plan --platform desktop"].startswith("desktop, tier smoke: 1 of 1 points to run")
    assert re.search(r"as Slurm jobs: \d+ .*GPU-hours", said["repro plan --platform mycluster"])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute alone; beside the cluster's tests and two others, on slow cores, over five
def test_all_of_it(project, said):
    """The figure through its notebook, the report, the verdict, the comparison, and the pages."""
    found = run_all(commands(LAST, "repro"))
    report = (project / "results/laptop-smoke/report.html").read_text()
    assert "Shared birthdays" in report and "BD-1" in report
    assert "Among 23 people two share a birthday with a chance of <a" in re.sub(r"\s+", " ", report)
    assert "BD-1" in (project / "results/laptop-smoke/notebooks/birthday.html").read_text()
    assert re.search(r"BD-1.*reproduced", found["repro claims BD --results results/laptop-smoke"])
    (compared,) = (text for line, text in found.items() if line.startswith("repro compare"))
    assert re.search(r"BD-1.* yes", compared)
    assert re.search(r"BD-1.*`repro reproduce birthday_chance`", (project / "docs/claims.md").read_text())
    for page in ("sc-ad-ae.tex", "eurosys.md"):
        assert "Shared birthdays" in (project / "docs/appendix" / page).read_text(), page
