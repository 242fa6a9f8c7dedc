"""Metrics of two folders of records: what is counted is the same, what a clock measures lies in an interval."""

from datetime import timedelta
from pathlib import Path

import pytest
from claims_made_up import WHEN
from hypothesis import given
from hypothesis import strategies as st

from repro import experiments
from repro.claims import metrics
from repro.claims.sides import Side
from repro.records.record import Metric, Provenance, Record


def run(
    experiment="zero_train", repeat=0, evidence="emulated", conditions=None, hour=0, about=None, **values
) -> Record:
    start = WHEN + timedelta(hours=hour)
    units = experiments.get(experiment).metrics.units()
    return Record(
        experiment=experiment,
        point=experiments.get(experiment).parameters().model_dump(),
        repeat=repeat,
        seed=0,
        evidence=evidence,
        status="ok",
        metrics={name: Metric(value=value, unit=units[name]) for name, value in values.items()},
        conditions=conditions or {},
        provenance=Provenance(start=start, end=start, **(about or {})),
    )


def timed(*seconds: float, **about) -> list[Record]:
    """Repeats hours apart, which send the same bytes."""
    return [
        run(repeat=number, hour=2 * number, step_seconds=each, bytes_node=100.0, **about)
        for number, each in enumerate(seconds)
    ]


def side(name, runs):
    return Side(name, Path(name), {Path(f"{each.experiment}/{n}.json"): each for n, each in enumerate(runs)}, [])


def compared(ours, theirs):
    return metrics.compare(side("A", ours), side("B", theirs))


def told(ours, theirs, metric):
    (row,) = [row for row in compared(ours, theirs)[0] if row.title == metric]
    return row


def test_what_repeats_never_differ_in_is_to_be_the_same_and_its_record_is_named():
    ours = timed(1.0, 1.1)
    ours[1].metrics["bytes_node"] = Metric(value=101.0, unit="bytes")
    rows = [row for row in compared(ours, timed(1.0, 1.1))[0] if row.title == "bytes_node"]
    assert [(row.name, row.inside) for row in rows] == [("zero_train/0.json", True), ("zero_train/1.json", False)]
    assert rows[1].ratio == pytest.approx(1.01)


@pytest.mark.parametrize(("seconds", "inside"), [(1.05, True), (1.5, False), (0.5, False)])
def test_times_are_held_to_the_occasions_of_the_other_side(seconds, inside):
    row = told(timed(seconds), timed(1.0, 1.05, 1.1), "step_seconds")
    assert row.inside is inside and row.allowed[0] < 1.05 < row.allowed[1] and row.name == "zero_train/0.json"


def test_the_more_times_are_compared_the_wider_each_interval():
    more = {"compute_seconds": (0.5, 0.52, 0.55)}
    theirs = timed(1.0, 1.05, 1.1)
    (low, high) = told(timed(1.05), theirs, "step_seconds").allowed
    for each, seconds in zip(theirs, more["compute_seconds"], strict=True):
        each.metrics["compute_seconds"] = Metric(value=seconds, unit="s")
    ours = timed(1.05)
    ours[0].metrics["compute_seconds"] = Metric(value=0.51, unit="s")
    assert told(ours, theirs, "step_seconds").allowed[0] < low < high < told(ours, theirs, "step_seconds").allowed[1]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (timed(1.05), timed(1.0), "too few runs: B has 1 of 3 occasions of this point"),
        (timed(1.05), timed(1.0, 1.1), "too few runs: B has 2 of 3 occasions of this point"),
        (timed(1.05), timed(1.0, 1.0, 1.0), "too few runs: all of B are alike here, and those of other points are not"),
        (timed(1.05, about={"cores": 8}), timed(1.0, 1.1), "other machine: times are compared on machines of one kind"),
        (timed(1.0, about={"source_hash": "x"}), timed(1.0, 1.1), "other code: the same value"),
    ],
)
def test_times_that_cannot_be_compared_are_said_as_that(ours, theirs, said):
    row = told(ours, theirs, "step_seconds")
    assert row.inside is None and row.said == said


def test_runs_of_two_kinds_are_one_row_that_says_why():
    shaped, not_shaped = timed(1.0, conditions={"fabric": "shaped"}), timed(1.0, conditions={"fabric": "unshaped"})
    (row,) = compared(shaped, not_shaped)[0]
    assert row.said == "other conditions: fabric: A shaped, B unshaped" and row.inside is None
    (row,) = compared(timed(1.0), timed(1.0, evidence="measured"))[0]
    assert row.said == "other evidence: A emulated, B measured"


def test_a_metric_or_a_record_that_one_side_lacks_is_named():
    theirs = timed(1.0, 1.1)
    del theirs[0].metrics["bytes_node"]
    rows, only_a, only_b = compared(timed(1.0), theirs)
    (row,) = [row for row in rows if row.title == "bytes_node"]
    assert row.said == "no value: bytes_node is not in B" and row.inside is None
    assert (only_a, only_b) == ([], ["zero_train/1.json"])


def test_a_model_s_seconds_are_computed_and_a_search_s_are_not_timed():
    model = [run("flover_queue", evidence="modelled", total_seconds=each) for each in (1.0, 1.1)]
    assert told([model[0]], [model[1]], "total_seconds").inside is False
    search = [run("exflow_placement", evidence="measured", seconds=each) for each in (1.0, 1.1)]
    assert (
        told([search[0]], [search[1]], "seconds").said
        == "not timed: it depends on seconds, and other points ran beside it"
    )


@given(st.lists(st.tuples(st.floats(0.5, 4), st.floats(0.5, 4)), min_size=1, max_size=3))
def test_swapping_the_sides_inverts_every_ratio(values):
    sides = [timed(*each) for each in zip(*values, strict=True)]
    one, other = (told(*each, "step_seconds").ratio for each in (sides, sides[::-1]))
    assert one * other == pytest.approx(1)


def test_what_a_search_found_when_its_seconds_were_up_need_not_be_the_same():
    def searched(fraction, limited):
        return [
            run(
                "exflow_placement",
                evidence="measured",
                conditions={"time_limited": limited},
                crossing_fraction=fraction,
            )
        ]

    assert told(searched(0.5, "no"), searched(0.6, "no"), "crossing_fraction").inside is False
    assert told(searched(0.5, "yes"), searched(0.6, "yes"), "crossing_fraction").said.startswith("not timed: ")
