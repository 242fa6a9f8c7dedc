"""Marks of repeated measurements: what is drawn for several values, and for one."""

import math
from dataclasses import replace

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from repro.claims.sample import Sample
from repro.report.figures import marks


@pytest.fixture
def axes():
    return plt.figure().add_subplot()


def test_one_value_has_no_interval():
    value, [[below], [above]] = marks.middle([3.0])
    assert value == 3 and math.isnan(below) and math.isnan(above)
    value, [[below], [above]] = marks.middle([1.0, 2.0, 4.0])
    assert (value, below, above) == (2, 1, 2)


def test_points_join_the_medians_in_the_order_of_x(axes):
    table = pd.DataFrame({"x": [4, 2, 2, 2], "y": [9.0, 1.0, 2.0, 6.0]})
    marks.points(axes, table.groupby("x").y, "--", label="us", **marks.look(0))
    line = next(line for line in axes.lines if line.get_label() == "us")
    assert line.get_xydata().tolist() == [[2, 2], [4, 9]]


@pytest.mark.parametrize(("across", "end"), [(True, (4, 0)), (False, (0, 4))])
def test_a_bars_number_stands_at_the_end_of_its_interval(axes, across, end):
    marks.bar(axes, 0, [1.0, 2.0, 4.0], ".1f", across=across)
    assert [(text.get_text(), text.xy) for text in axes.texts] == [("2.0", end)]


def test_a_claims_number_is_drawn_with_its_interval_where_it_has_one(axes):
    sample = Sample([1.0, 3.0], [0, 0], 2.0, (-math.inf, math.inf), "2 of 6", "measured", {}, {}, [])
    assert marks.point(axes, 0, sample) == 2 and marks.said(sample) == "2 (2 of 6)"
    marks.point(axes, 2, replace(sample, interval=(-math.inf, 4.0)))  # one end alone would be a stray tick
    assert 4.0 not in {y for line in axes.lines for y in line.get_ydata()}
    wide = replace(sample, interval=(1.5, 4.0))
    marks.point(axes, 1, wide)
    ends = [path.vertices[:, 1].tolist() for each in axes.collections for path in each.get_paths()]
    assert [1.5, 4.0] in ends and marks.said(wide) == "2 [1.5, 4] (2 of 6)"
