"""The RO-Crate of a bundle describes what is in it, as the profile of workflow runs asks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rocrate.rocrate import ROCrate
from small_checkout import EXPERIMENT

from repro.records import record

VALIDATE = Path(__file__).with_name("validate.py")


@pytest.fixture(scope="module")
def crate(elsewhere) -> ROCrate:
    return ROCrate(elsewhere)


def test_it_is_a_run_of_the_snakefile(crate, elsewhere):
    workflow = crate.mainEntity
    assert workflow.id == "workflows/Snakefile" and "ComputationalWorkflow" in workflow.type
    assert workflow["programmingLanguage"]["name"] == "Snakemake"
    (action,) = crate.root_dataset["mentions"]
    assert action.type == "CreateAction" and action["instrument"] is workflow and "agent" not in action.properties()
    (folder,) = elsewhere.glob("results/reference/*/records")
    runs = [record.read(path) for path in (folder / EXPERIMENT).glob("*.json")]
    assert action["startTime"] == min(run.provenance.start for run in runs).isoformat()
    assert action["endTime"] == max(run.provenance.end for run in runs).isoformat()
    assert action["name"].startswith(f"{len(runs)} runs")
    assert {part.id for part in action["object"]} == {"config/", "data/"}
    records = f"{folder.relative_to(elsewhere).as_posix()}/"
    shown = {f"results/rendered/{name}" for name in ("report.html", "claims.json", "figures/")}
    assert {part.id for part in action["result"]} == {records, *shown}
    for side, parts in (("input", action["object"]), ("output", action["result"])):
        assert [parameter["workExample"] for parameter in workflow[side]] == parts
        assert all(parameter["additionalType"] in ("File", "Dataset") for parameter in workflow[side])


def test_all_that_it_names_is_in_the_bundle(crate, elsewhere):
    parts = [part.id for part in crate.root_dataset["hasPart"]]
    assert len(parts) == len({*parts}) > 8
    assert [part for part in parts if not (elsewhere / part).exists()] == []
    graph = json.loads((elsewhere / "ro-crate-metadata.json").read_text())["@graph"]
    known = {entity["@id"] for entity in graph}
    unknown = {identifier for entity in graph for identifier in named(entity) if identifier not in known}
    assert {one for one in unknown if not one.startswith("https://")} == set()


def named(value: object) -> list[str]:
    """Every identifier that an entity refers to."""
    if isinstance(value, dict):
        here = [value["@id"]] if value.keys() == {"@id"} else []
        return here + [found for each in value.values() for found in named(each)]
    return [found for each in value for found in named(each)] if isinstance(value, list) else []


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_validator_of_its_profile_finds_nothing_that_is_required(elsewhere, tmp_path):
    """In an environment of its own: it needs an older `rich` than ours. About a minute."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "roc-validator==0.13.0"], check=True)
    # an older rocrate has the JSON-LD context of RO-Crate 1.1 in it, so no network is needed
    older = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "older", "rocrate==0.13.0"]
    subprocess.run(older, check=True)
    context = tmp_path / "older/rocrate/data/ro-crate.jsonld"
    command = [python, VALIDATE, elsewhere, context, tmp_path / "cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    metadata = elsewhere / "ro-crate-metadata.json"
    whole = metadata.read_text()
    try:
        metadata.write_text(whole.replace('"CreateAction"', '"Action"'))
        broken = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    finally:
        metadata.write_text(whole)
    assert broken.returncode == 1 and "CreateAction" in broken.stdout, broken.stdout + broken.stderr
