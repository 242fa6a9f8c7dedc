"""The benchmark of bounds: rows of every variant, whose bounds are below what was found."""

import csv
import math
import sys

import placement_bounds
import pytest


def test_bounds_are_below_what_was_found(tmp_path, monkeypatch, capsys):
    out = tmp_path / "bounds.csv"
    options = f"--routings 8e --gpus 4 --variants --search-seconds 0.3 --bound-seconds 3 --csv {out}"
    monkeypatch.setattr(sys, "argv", ["placement_bounds.py", *options.split()])
    placement_bounds.main()
    rows = list(csv.DictReader(out.open()))
    assert [row["slots"] for row in rows] == ["0", "0", "0", "1", "2", "4"]
    assert not rows[0]["load"] and float(rows[1]["load"]) >= 1 and float(rows[0]["bound"]) <= float(rows[1]["bound"])
    for row in rows:
        found, quick, bound, gap = (float(row[name]) for name in ("found", "quick", "bound", "gap"))
        assert 0 <= quick <= bound <= found
        assert gap == (pytest.approx(found / bound - 1) if bound > 0 else math.inf)
    assert float(rows[0]["gap"]) == 0 and float(rows[2]["bound"]) > 0
    assert "gpt_moe_routing_8e" in capsys.readouterr().out


def test_unknown_routings_are_named(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["placement_bounds.py", "--routings", "none"])
    with pytest.raises(SystemExit, match="known: gptoss20b_routing, gpt_moe"):
        placement_bounds.main()
