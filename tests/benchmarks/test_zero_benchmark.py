"""The table of `benchmarks/zero.py`, of numbers that are easy to follow by hand."""

import pytest
import zero as benchmark

from repro.experiments.zero_train import ZeroTrain
from repro.scaling.step import layout_of
from repro.zero import plan, traffic

CASES = [("hierarchical", 4), ("zeropp", 4)]


def seen(compute: float) -> benchmark.Seen:
    seconds = {CASES[0]: [1.0, 2.0, 2.0], CASES[1]: [2.0, 3.0, 8.0]}
    return benchmark.Seen(
        {4: compute}, seconds, {case: {"package": 3e6, "node": 2e6, "cluster": 1e6} for case in CASES}
    )


def test_a_row_compares_medians_of_rounds_with_the_bound_and_with_zeropp_round_by_round():
    shown = benchmark.table(ZeroTrain(), CASES, [seen(4.0), seen(5.0)])
    columns = {column.header: list(column.cells) for column in shown.columns}
    assert columns["step s"] == ["2.000", "3.000"]
    assert columns["bound s"] == ["5.000", "5.000"]  # the slowest rank's compute
    assert columns["x bound"] == ["0.400", "0.600"]
    assert columns["over"] == ["2.000", "1.000"]
    assert 1.3 < float(columns["x links"][0]) < 1.6, (
        "two blocks: the second half of the sums has nothing to hide behind"
    )
    assert columns["MB package"] == ["6.00", "6.00"] and columns["MB cluster"] == ["2.00", "2.00"]


def test_on_links_alone_more_blocks_are_nearer_to_the_bound():
    columns = benchmark.links_table(ZeroTrain(), ["hierarchical"], [1]).columns
    ratios = [float(cell) for cell in columns[2].cells]
    assert ratios == sorted(ratios, reverse=True) and ratios[0] > 1.4 and 1 <= ratios[-1] < 1.1


def test_the_bound_is_the_longest_of_compute_and_each_level():
    point = ZeroTrain()
    chosen, model = plan.named("hierarchical", point.topology), layout_of(point.gpt)
    sent = traffic.step_bytes(chosen, model, 8)
    package, node, cluster = (level.bytes_per_s for level in point.topology.levels)
    own_link = sum(sent.values()) / 8 / package  # what leaves a package leaves the rank as well
    assert own_link > max(sent["node"] / node, sent["cluster"] / cluster) / 8
    assert traffic.bound_seconds(chosen, model, 8) == pytest.approx(own_link)
    assert traffic.bound_seconds(chosen, model, 8, compute_s=2 * own_link) == 2 * own_link
    assert traffic.bound_seconds(chosen, model, 1) == pytest.approx(sent["cluster"] / 8 / cluster)
