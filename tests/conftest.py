"""Fixtures that more than one room uses."""

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from repro import paths, record
from repro.models.llama import Llama, LlamaConfig


@pytest.fixture(scope="session")
def model() -> Llama:
    """A language model small enough that hundreds of generations take a second."""
    return Llama.random(LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=256), seed=7)


@pytest.fixture
def make_record():
    """Build a valid record; keyword arguments replace its fields."""

    def build(**changes) -> record.Record:
        when = datetime(2026, 1, 1, tzinfo=UTC)
        fields = {
            "experiment": "flover_queue",
            "point": {"requests": 4},
            "repeat": 0,
            "seed": 0,
            "evidence": "modelled",
            "status": "ok",
            "metrics": {"total_seconds": record.Metric(value=1.5, unit="s")},
            "provenance": record.Provenance(start=when, end=when),
        }
        return record.Record(**(fields | changes))

    return build


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the project's own files in an empty folder, results apart: for tests that change configuration or run the DAG."""
    root = paths.root()
    for name in ("config", "workflows", "notebooks", "slurm"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints", ".snakemake"))
    (tmp_path / "workflow").symlink_to("workflows")
    (tmp_path / "data").symlink_to(root / "data")
    (tmp_path / "results").mkdir()
    (tmp_path / "results/reference").symlink_to(root / "results/reference")
    for name in ("constraints.txt", "environment.yml"):
        shutil.copy(root / name, tmp_path / name)
    monkeypatch.setenv("REPRO_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path
