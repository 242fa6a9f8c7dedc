"""The benchmark of bounds: rows of every variant, whose bounds are below what was found."""

import csv
import sys

import placement_bounds
import pytest


def test_bounds_are_below_what_was_found(tmp_path, monkeypatch, capsys):
    out = tmp_path / "bounds.csv"
    options = f"--routings 8e --gpus 4 --variants --search-seconds 0.3 --bound-seconds 3 --csv {out}"
    monkeypatch.setattr(sys, "argv", ["placement_bounds.py", *options.split()])
    placement_bounds.main()
    rows = list(csv.DictReader(out.open()))
    assert [(row["gpus"], row["load"], row["slots"]) for row in rows[-4:]] == [("4", "", "0"), ("4", "1.2", "0")] + [
        ("4", "", slots) for slots in ("1", "2")
    ] or [row["slots"] for row in rows] == ["0", "1", "2", "4"]  # where no placement keeps the limit on load
    for row in rows:
        assert 0 < float(row["bound"]) <= float(row["found"]) + 1e-9
        assert float(row["quick"]) <= float(row["bound"])
        assert float(row["gap"]) == pytest.approx(float(row["found"]) / float(row["bound"]) - 1)
    assert "gpt_moe_routing_8e" in capsys.readouterr().out


def test_unknown_routings_are_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["placement_bounds.py", "--routings", "none"])
    with pytest.raises(SystemExit, match="known: gptoss20b_routing, gpt_moe"):
        placement_bounds.main()
