"""A record is whole or not there. That nothing foreign passes for one: `tests/attack/test_records.py`."""

import os
import subprocess
import sys

import pandas as pd
import pytest

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


def test_a_series_is_decoded_once(tmp_path, make_record, monkeypatch):
    record.write(make_record(), tmp_path / "run.json", pd.DataFrame({"step": [0, 1]}))
    decoded, decode = [], record._parquet
    monkeypatch.setattr(record, "_parquet", lambda path: decoded.append(path) or decode(path))
    assert len(record.read_series(tmp_path / "run.json")) == 2 and decoded == [tmp_path / "run.parquet"]


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
        with pytest.raises(OSError, match=r"No space left on device: '.*disk/run.json'"):
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
