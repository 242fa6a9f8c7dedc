"""The structure of `src/repro`: which rooms there are, that imports run one way, and that no files import each other in a circle."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
# A room may import rooms of lines above its own. Engines are libraries: they see no experiment, record or configuration.
LAYERS = [
    ["topology", "paths", "files", "compiled"],
    ["quantize"],
    ["comm"],
    ["models"],
    ["zero", "exflow", "flover"],
    ["scaling"],
    ["emulate"],
    ["launch"],
    ["baselines"],
    ["records"],
    ["experiments"],
    ["plan"],
    ["claims", "jobs"],
    ["report"],
    ["bundle"],
    ["box"],
    ["cli"],
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((SOURCE / "repro").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path], anywhere: bool = True) -> Iterator[str]:
    """The modules of `repro` that a file imports; `anywhere`: inside functions and for type checkers, too."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if anywhere else tree.body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name not in known and "." in name:
                name = name.rpartition(".")[0]
            if name in known:
                yield name


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_nothing_lies_loose():
    loose = {path.stem for path in (SOURCE / "repro").glob("*.py")} - {"__init__", "__main__"}
    assert loose == {"topology", "paths", "files", "compiled"}
    assert {room(name) for name in modules()} - {"", "__main__"} == LAYER.keys()


def test_imports_run_one_way():
    known = modules()
    wrong = [
        f"{name} imports {other}"
        for name, path in known.items()
        for other in imported(path, known)
        if room(name) in LAYER
        and room(other) in LAYER
        and room(name) != room(other)
        and LAYER[room(other)] >= LAYER[room(name)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_files_import_each_other_in_a_circle():
    """A package may load parts of its own when they are needed (an experiment loads `run.py`), and they may import the package."""
    known = modules()
    graph = {}
    for name, path in known.items():
        late = set(imported(path, known)) - set(imported(path, known, anywhere=False))
        own_parts = {other for other in late if other.startswith(f"{name}.")}
        graph[name] = set(imported(path, known)) - own_parts - {name}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_workflow_calls_the_command_line():
    for path in [SOURCE.parent / "workflows/Snakefile", *sorted((SOURCE.parent / "workflows").rglob("*.smk"))]:
        assert not re.search(r"^\s*(from|import) repro", path.read_text(), re.MULTILINE), path
