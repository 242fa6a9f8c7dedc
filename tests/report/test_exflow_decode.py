"""What each change gives over DeepSpeed-MoE: the parts sum to the whole, within a repeat; every repeat is drawn."""

import itertools
import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from repro.report.figures import base, exflow_decode

SECONDS = {0: [8.0, 4.0, 2.0, 1.0, 16.0], 1: [6.0, 4.0, 5.0, 2.0, None], 2: [9.0, 3.0, None, 1.0, 9.0]}  # by step


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def runs(seconds=SECONDS, **values):
    fixed = {"experts": 16, "nodes": 2, "packages": 2, "gcds": 2, "cluster_mbit_s": 25.0, "fabric": "shaped"}
    keys = ("system", "keys_values", "placement")
    return pd.DataFrame(
        {**fixed, **values, **dict(zip(keys, step, strict=True)), "repeat": repeat, "iteration_seconds": number}
        for repeat, numbers in seconds.items()
        for step, number in zip(exflow_decode.STEPS, numbers, strict=True)
        if number is not None
    ).assign(evidence="measured", weights="trained", requests=128, older_code=False)


def test_parts_of_a_gain_sum_to_the_whole_within_a_repeat():
    found = exflow_decode.gains(runs())
    assert list(found.index.get_level_values("repeat")) == [0, 1]  # repeat 2 lacks a step
    first, second = (found.iloc[row] for row in range(2))
    assert first[exflow_decode.CHANGES].tolist() == pytest.approx([math.log(2)] * 3)
    assert second[exflow_decode.CHANGES].tolist() == pytest.approx([math.log(6 / 4), math.log(4 / 5), math.log(5 / 2)])
    assert found["all"].tolist() == pytest.approx([math.log(8), math.log(3)])
    assert first["K/V sent"] == pytest.approx(-math.log(16)) and math.isnan(second["K/V sent"])


def test_models_ranks_and_rates_are_told_apart():
    every = pd.concat([runs(), runs(experts=8), runs(cluster_mbit_s=100.0), runs(nodes=1)])
    assert len(exflow_decode.gains(every).groupby(exflow_decode.POINT)) == 4


def test_every_repeat_is_a_line(monkeypatch):
    monkeypatch.setattr(base, "_runs", lambda folder, name: runs())
    drawing = exflow_decode.exflow_gain(base.Data("records"))
    (axes,) = (axes for axes in drawing.figure.axes if axes.get_visible())
    drawn = [tuple(line.get_ydata()) for line in axes.lines]
    for repeat in ((1, 2, 4, 8), (1, 6 / 4, 6 / 5, 3)):
        assert any(len(line) == 4 and line == pytest.approx(repeat) for line in drawn)
    mean = [math.exp((math.log(a) + math.log(b)) / 2) for a, b in ((1, 1), (2, 1.5), (4, 1.2), (8, 3))]
    assert any(len(line) == 4 and line == pytest.approx(mean) for line in drawn)
    texts = {text.get_text() for text in axes.texts}
    assert {f"×{after / before:.2f}" for before, after in itertools.pairwise(mean)} < texts


def test_without_all_steps_there_is_nothing_to_show(monkeypatch):
    monkeypatch.setattr(base, "_runs", lambda folder, name: runs({2: SECONDS[2]}))
    with pytest.raises(base.NothingToShow, match="DeepSpeed's layers and all three"):
        exflow_decode.exflow_gain(base.Data("records"))
