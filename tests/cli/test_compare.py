"""`repro compare` as a user meets it: what it prints, and its exit code."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from repro import paths
from repro.cli import app
from repro.plan import config
from repro.records import record

SHIPPED = paths.root() / config.load()[0].shipped
SOME = ("flover_queue", "exflow_affinity")


@pytest.fixture
def copy(tmp_path):
    """A copy of some shipped records, and the shipped ones of the same experiments."""
    for folder in ("A", "B"):
        for name in SOME:
            shutil.copytree(SHIPPED / "records" / name, tmp_path / folder / "records" / name)
    return tmp_path


def call(*words, code):
    found = CliRunner().invoke(app, ["compare", *map(str, words)], env={"COLUMNS": "100"})
    assert found.exit_code == code, found.output
    return found.output


def change(path, metric, factor):
    """A record as honest runs would have left it, but for one number."""
    found = record.read(path)
    found.metrics[metric] = found.metrics[metric].model_copy(update={"value": found.metrics[metric].value * factor})
    path.write_text(found.model_dump_json())


def first(folder, experiment):
    return sorted((folder / "records" / experiment).glob("*.json"))[0]


def test_the_same_folder_twice_is_equal_and_fits_a_screen():
    said = call(SHIPPED.name, SHIPPED, code=0)
    agree = re.findall(r"(\d+) of (\d+) (claims|metrics of records that no clock changes|timed metrics) agree", said)
    assert [each[2] for each in agree] == ["claims", "metrics of records that no clock changes", "timed metrics"]
    assert all(one == all_ and int(one) > 20 for one, all_, _ in agree)
    assert "differs" not in said and len(said.splitlines()) < 30


def test_a_changed_metric_is_named_with_its_record(copy):
    path = first(copy / "A", "exflow_affinity")
    metric = next(name for name, each in record.read(path).metrics.items() if each.value)
    change(path, metric, 1.25)
    said = call(copy / "A", copy / "B", code=1)
    assert f"differs exflow_affinity/{path.name} {metric}: " in said and "ratio 1.25" in said
    every = call(copy / "A", copy / "B", "--all", code=1)
    assert every.count("\n") > said.count("\n") and "more that differ" not in every
    rows = json.loads(call(copy / "A", copy / "B", "--json", code=1))
    (row,) = [row for row in rows["metrics"] if row["inside"] is False]
    assert row["name"].endswith(path.name) and row["title"] == metric and row["ratio"] == pytest.approx(1.25)


def test_a_record_that_one_side_lacks_is_named(copy):
    path = first(copy / "A", "flover_queue")
    path.unlink()
    said = call(copy / "A", copy / "B", code=0)
    assert "1 record only B" in said and f"only B: flover_queue/{path.name}" in said
    assert json.loads(call(copy / "A", copy / "B", "--json", code=0))["only_b"] == [f"flover_queue/{path.name}"]


def test_a_claim_that_turns_is_named_with_both_verdicts(copy):
    for path in (copy / "A/records/flover_queue").glob("*.json"):
        for metric in record.read(path).metrics:
            if "speedup" in metric or "ratio" in metric:
                change(path, metric, 0.01)
    said = call(copy / "A", copy / "B", code=1)
    said = said.replace("†", "")  # of records by older code
    assert "1 verdict flipped" in said and "differs FL-F8.b" in said and "verdict deviates, B reproduced" in said, said


def test_what_is_no_record_is_named_and_ends_with_2(copy):
    (broken := first(copy / "A", "flover_queue")).write_text("{")
    said = call(copy / "A", copy / "B", code=2)
    assert f"{broken}: not a run record" in said and "metrics of records that no clock changes agree" in said


def test_folders_that_share_no_point_do_not_pass(copy):
    shutil.rmtree(copy / "A/records/flover_queue")
    shutil.rmtree(copy / "B/records/exflow_affinity")
    assert "nothing could be compared" in call(copy / "A", copy / "B", code=2)
