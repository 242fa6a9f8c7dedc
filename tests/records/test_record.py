"""A record is whole or not there, and nothing foreign passes for one."""

import json
import os
import subprocess
import sys

import jsonschema
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from repro.files import replacing
from repro.records import record


def test_round_trip_with_series(tmp_path, make_record):
    path = tmp_path / "a" / "run.json"
    series = pd.DataFrame({"step": [0, 1], "loss": [2.5, 2.25]})
    record.write(make_record(), path, series)
    found = record.read(path)
    assert found.metrics["total_seconds"].value == 1.5
    pd.testing.assert_frame_equal(record.read_series(path), series)
    assert sorted(p.name for p in path.parent.iterdir()) == ["run.json", "run.parquet"]


def test_document_matches_the_exported_schema(make_record):
    jsonschema.validate(json.loads(make_record().model_dump_json()), record.Record.model_json_schema())


@given(cut=st.integers(min_value=0, max_value=200))
def test_a_truncated_record_is_reported_by_name(tmp_path_factory, cut):
    from datetime import UTC, datetime

    when = datetime(2026, 1, 1, tzinfo=UTC)
    whole = record.Record(
        experiment="x", point={}, repeat=0, seed=0, evidence="measured", status="ok",
        metrics={"m": record.Metric(value=1, unit="s")}, provenance=record.Provenance(start=when, end=when),
    ).model_dump_json()  # fmt: skip
    path = tmp_path_factory.mktemp("records") / "cut.json"
    path.write_text(whole[:cut])
    found = record.collect(path.parent)
    assert not found.records
    assert len(found.problems) == 1 and "cut.json" in found.problems[0]


def test_foreign_and_future_files_are_reported(tmp_path, make_record):
    (tmp_path / "foreign.json").write_text('{"hello": 1}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    document = json.loads(make_record().model_dump_json()) | {"schema_version": 99}
    (tmp_path / "future.json").write_text(json.dumps(document))
    record.write(make_record(), tmp_path / "good.json")
    found = record.collect(tmp_path)
    assert [path.name for path in found.records] == ["good.json"]
    assert len(found.problems) == 3
    assert all(any(name in problem for problem in found.problems) for name in ("foreign", "binary", "future"))
    assert "schema_version" in next(problem for problem in found.problems if "future.json" in problem)


@pytest.mark.parametrize(
    "change",
    [
        {"status": "failed"},  # no cause
        {"cause": "oom"},  # ok with a cause
        {"metrics": {}},  # ok without numbers
        {"evidence": None},  # ok without evidence
        {"evidence": "guessed"},
        {"cause": "tired", "status": "failed"},
        {"metrics": {"m": {"value": float("nan"), "unit": "s"}}},
        {"surprise": 1},
    ],
)
def test_inconsistent_records_are_refused(make_record, change):
    with pytest.raises(ValidationError):
        make_record(**change)


def test_a_failing_write_leaves_the_old_record(tmp_path, make_record):
    path = tmp_path / "run.json"
    record.write(make_record(seed=1), path)
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half a rec")
        raise RuntimeError("killed")
    assert record.read(path).seed == 1
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_kill_while_writing_leaves_the_old_record(tmp_path, make_record):
    path = tmp_path / "run.json"
    record.write(make_record(seed=1), path)
    code = (
        "import os, signal, sys, pathlib; from repro.files import replacing\n"
        "with replacing(pathlib.Path(sys.argv[1])) as t:\n"
        "    t.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -9
    found = record.collect(tmp_path)  # the killed writer's temporary file is no record and no problem
    assert [run.seed for run in found.records.values()] == [1] and not found.problems


@pytest.mark.root
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or sys.platform != "linux",
    reason="mounts a small file system: needs root on Linux",
)
def test_a_full_disk_loses_no_finished_record(tmp_path, make_record):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        record.write(make_record(seed=1), disk / "run.json")
        with pytest.raises(OSError, match="No space left"):
            record.write(make_record(seed=2, detail="x" * 200_000), disk / "run.json")
        assert record.read(disk / "run.json").seed == 1
        record.write(make_record(seed=3), disk / "run.json")  # the failed write gave its space back
        assert record.read(disk / "run.json").seed == 3
    finally:
        subprocess.run(["umount", disk], check=True)


def test_frame_has_one_row_per_record(tmp_path, make_record):
    record.write(make_record(repeat=0), tmp_path / "a.json")
    record.write(make_record(repeat=1, conditions={"fabric": "shaped"}), tmp_path / "b.json")
    table = record.frame(record.collect(tmp_path).records)
    assert list(table["repeat"]) == [0, 1]
    assert list(table["total_seconds"]) == [1.5, 1.5]
    assert table["fabric"].tolist()[1] == "shaped"


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_a_record_without_its_series_is_named(tmp_path, make_record, harm):
    path = tmp_path / "run.json"
    record.write(make_record(), path, pd.DataFrame({"step": [0, 1]}))
    series = path.with_suffix(".parquet")
    series.write_bytes(series.read_bytes()[:100]) if harm == "cut" else series.unlink()
    found = record.collect(tmp_path)
    assert not found.records and "'run.parquet' is missing or damaged" in found.problems[0]
