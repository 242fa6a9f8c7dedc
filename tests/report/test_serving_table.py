"""The tables of this engine beside other servers, from the rounds that a benchmark kept."""

import pandas as pd
import pytest

from repro import paths
from repro.report.docs import serving

COLUMNS = ["server", "round", "tokens/s", "× bound", "TTFT mean", "TTFT p99", "latency p99", "gap"]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Writes rounds as shipped ones, and reads them."""
    monkeypatch.setattr(paths, "root", lambda: tmp_path)

    def read(*rows, load=0):
        table = pd.DataFrame(rows, columns=COLUMNS).assign(
            workload="long", model="smollm2-135m", dtype="float32", load=load
        )
        (tmp_path / "here/benchmarks").mkdir(parents=True, exist_ok=True)
        table.to_csv(tmp_path / "here/benchmarks/serving.csv", index=False)
        return serving.settings("here")

    return read


def test_a_ratio_is_to_the_peer_that_is_best_in_that_column_within_rounds(shipped):
    (found,) = shipped(
        ("ours", 0, 120, 1.2, 1.0, 2, 9, 0.2),
        ("a", 0, 100, 1.5, 2.0, 2, 10, 0.9),
        ("b", 0, 60, 1.9, 1.25, 2, 20, 0.8),
        ("ours", 1, 240, 1.4, 1.0, 2, 9, 0.2),
        ("a", 1, 150, 1.5, 2.0, 2, 10, 0.9),
        ("b", 1, 60, 1.9, 1.25, 2, 20, 0.8),
        ("ours, whole prompts", 1, 999, 1.0, 0.1, 1, 1, 0.1),
    )
    assert found.name == "`long`, SmolLM2, fp32"
    assert found.ratio["tokens/s"] == pytest.approx(((1.2 * 1.6) ** 0.5, 1.2, 1.6))
    assert found.ratio["TTFT mean"] == pytest.approx((0.8, 0.8, 0.8))
    assert found.medians["tokens/s"] == (180, 125) and found.medians["gap"] == (0.2, 0.8)
    assert not any(map(found.misses, serving.AIM))


@pytest.mark.parametrize(("tokens", "first", "missed"), [(109, 0.9, ["tokens/s"]), (110, 0.91, ["TTFT mean"])])
def test_what_misses_the_aim_is_named(shipped, tokens, first, missed):
    (found,) = shipped(("ours", 0, tokens, 1, first, 1, 0.5, 0.2), ("a", 0, 100, 1, 1, 1, 1, 1))
    assert [column for column in serving.AIM if found.misses(column)] == missed


def test_a_setting_without_a_peer_is_named_and_one_beside_load_left_out(shipped):
    with pytest.raises(ValueError, match="`long`, SmolLM2, fp32, tokens/s: no round has this engine and another"):
        shipped(("ours", 0, 1, 1, 1, 1, 1, 1), ("a", 1, 1, 1, 1, 1, 1, 1))
    assert shipped(("ours", 0, 1, 1, 1, 1, 1, 1), load=2) == []
