"""A small checkout with one run: all code and configuration, and the records of one experiment. For the tests of bundles."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from repro import paths
from repro.claims import registry
from repro.experiments import stored
from repro.plan import config
from repro.report.page import links

FILES = ("CITATION.cff", "LICENSE", "README.md", "Makefile", "constraints.txt", "environment.yml", ".gitignore")
FILES += ("pyproject.toml", "requirements.lock")
FOLDERS = ("src", "config", "workflows", "notebooks", "data/published")
EXPERIMENT = "zero_train"


def git(folder: Path, *words: str) -> None:
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    when = {f"GIT_{role}_DATE": "1700000000 +0100" for role in ("AUTHOR", "COMMITTER")}
    subprocess.run(["git", "-C", str(folder), *words], check=True, env=os.environ | who | when, capture_output=True)


def build(folder: Path) -> None:
    """Write and commit it. Its `results/replot` holds verdicts on its records, a report with links alone, and in name only a
    figure and a notebook."""
    root = paths.root()
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".ipynb_checkpoints")
        shutil.copytree(root / name, folder / name, ignore=ignored)
    for name in FILES:
        shutil.copy(root / name, folder / name)
    (folder / "workflow").symlink_to("workflows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPRO_ROOT", str(folder))
        records = f"results/reference/{config.load()[0].reference}/records"
        shutil.copytree(root / records / EXPERIMENT, folder / records / EXPERIMENT)
        show(folder / "results/replot", folder / records)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All of it")


def show(run: Path, records: Path) -> None:
    """What a finished run leaves beside its records."""
    (run / "figures").mkdir(parents=True)
    found = stored.collect(records)
    rows = registry.evaluate(registry.load(), found.records, found.problems)
    (run / "claims.json").write_text(json.dumps([row.model_dump(mode="json") for row in rows]))
    (run / "notebooks").mkdir()
    (run / "notebooks/zero.html").write_text("<title>zero</title>\n")
    page = run / "report.html"
    near = [links.section("zero_bytes", page), *(links.to(path, page) for path in found.records)]
    page.write_text("<title>report</title>\n" + "".join(f'<a href="{to.address}">{to.text}</a>\n' for to in near))
    (run / "figures/zero_bytes.png").write_bytes(b"\x89PNG")
    (run / "logs").mkdir()
    (run / "logs/zero.log").write_text("not for others\n")
