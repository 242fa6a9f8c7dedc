"""docs/bundle.md: with the same environment, figures, verdicts and report come out the same wherever they are drawn."""

import os
import subprocess
import sys

import pytest

from repro import paths
from repro.plan import config


def made(folder, **environment):
    """What commands write of the shipped records in an environment; bytes by name."""
    shipped = paths.root() / config.load()[0].shipped
    for words in (
        ["figure", "flover_model", "--out", f"{folder}/figures"],
        ["claims", "--out", f"{folder}/claims.json"],
        ["report", "--figures", f"{folder}/figures", "--out", f"{folder}/report.html"],
    ):
        command = [sys.executable, "-m", "repro", *words, "--results", str(shipped)]
        subprocess.run(command, env=os.environ | environment, check=True, capture_output=True)
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.exhaustive
def test_another_time_zone_and_order_of_hashes_change_no_byte(tmp_path):
    first = made(tmp_path / "first", TZ="UTC", PYTHONHASHSEED="1")
    assert len(first) >= 4
    assert made(tmp_path / "second", TZ="Asia/Kathmandu", PYTHONHASHSEED="7", LC_ALL="C.UTF-8") == first
