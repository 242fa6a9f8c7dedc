"""Fixtures that more than one room uses."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

# Before torch is loaded: OpenMP's threads do not survive a fork, after which the next product waits for them for ever.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from repro import experiments, paths
from repro.models.llama import Llama, LlamaConfig
from repro.records import record

settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background; what it starts would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist the tests of a file share a process, and its fixtures. Long ones begin first."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.get_closest_marker("box") is None, item.path not in files))


@pytest.fixture(scope="session")
def model() -> Llama:
    """A language model small enough that hundreds of generations take a second."""
    return Llama.random(LlamaConfig(layers=2, width=32, heads=4, kv_heads=2, ffn=48, vocab=61, context=256), seed=7)


@pytest.fixture
def make_record():
    """Build a valid record; keyword arguments replace its fields."""

    def build(**changes) -> record.Record:
        when = datetime(2026, 1, 1, tzinfo=UTC)
        units = experiments.get("flover_queue").metrics.units()
        fields = {
            "experiment": "flover_queue",
            "point": {"requests": 4},
            "repeat": 0,
            "seed": 0,
            "evidence": "modelled",
            "status": "ok",
            "metrics": {name: record.Metric(value=1.5, unit=unit) for name, unit in units.items()},
            "provenance": record.Provenance(start=when, end=when),
        }
        return record.Record(**(fields | changes))

    return build


@contextlib.contextmanager
def copied_project(folder: Path) -> Iterator[Path]:
    """A copy of the project's own files in an empty folder, results apart; the block runs in it."""
    root = paths.root()
    for name in ("config", "workflows", "notebooks", "slurm"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns(".ipynb_checkpoints", ".snakemake"))
    (folder / "workflow").symlink_to("workflows")
    (folder / "data").symlink_to(root / "data")
    (folder / "results").mkdir()
    (folder / "tmp").mkdir()
    (folder / "results/reference").symlink_to(root / "results/reference")
    (root / ".cache").mkdir(exist_ok=True)
    (folder / ".cache").symlink_to(root / ".cache")  # hashes of the same sources, which take a second to find anew
    for name in ("constraints.txt", "environment.yml"):
        shutil.copy(root / name, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(folder))
        patch.setenv("TMPDIR", str(folder / "tmp"))  # a measuring lock of its own: its points wait for no other test's
        patch.chdir(folder)
        yield folder


def smoke_points(project: Path, grids: dict[str, list[dict]]) -> None:
    """Replace the points of tier `smoke` in a copy of the project."""
    path = project / "config/config.yaml"
    document = yaml.safe_load(path.read_text())
    for name, experiment in document["experiments"].items():
        experiment["tiers"] = {"smoke": grids[name]} if name in grids else {}
    path.write_text(yaml.safe_dump(document))


def wait_for(what: Callable[[], object], process: subprocess.Popen) -> None:
    """Until something is so, while a process runs; two minutes at most, on cores that other tests share."""
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A copy of the project for one test: it may change configuration or run the DAG."""
    with copied_project(tmp_path) as folder:
        yield folder


@pytest.fixture(scope="module")
def module_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, for the tests of one file together."""
    with copied_project(tmp_path_factory.mktemp("project")) as folder:
        yield folder
