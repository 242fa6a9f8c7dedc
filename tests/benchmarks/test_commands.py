"""The benchmarks that docs/commands.md names start."""

import importlib
import re
import sys

import pytest

from repro import paths

[NAMED] = re.findall(
    r"python benchmarks/placement\.py --help .*: (.*)", (paths.root() / "docs/commands.md").read_text()
)


@pytest.mark.parametrize("name", NAMED.split(", "))
def test_a_benchmark_tells_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


def test_all_are_named():
    folder = paths.root() / "benchmarks"
    commands = {path.stem for path in folder.glob("*.py") if "def main() -> None:" in path.read_text()}
    assert commands == set(NAMED.split(", "))
