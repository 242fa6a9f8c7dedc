"""docs/bundle.md: with the same environment, figures, verdicts and report come out the same wherever they are drawn."""

import json
import os
import subprocess
import sys

import pytest

from repro import paths
from repro.plan import config

IN_TURN = "import json, sys; from repro.cli import app; [app(words, standalone_mode=False) for words in json.loads(sys.argv[1])]"


def made(folder, **environment):
    """What commands write of the shipped records in an environment; bytes by name."""
    results = ["--results", str(paths.root() / config.load()[0].shipped)]
    words = [
        ["figure", "flover_model", "--out", f"{folder}/figures", *results],
        ["claims", "--out", f"{folder}/claims.json", *results],
        ["report", "--figures", f"{folder}/figures", "--out", f"{folder}/report.html", *results],
    ]
    command = [sys.executable, "-c", IN_TURN, json.dumps(words)]
    subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_time_zone_and_order_of_hashes_change_no_byte(tmp_path):
    first = made(tmp_path / "first", TZ="UTC", PYTHONHASHSEED="1")
    assert len(first) >= 4
    assert made(tmp_path / "second", TZ="Asia/Kathmandu", PYTHONHASHSEED="7", LC_ALL="C.UTF-8") == first
