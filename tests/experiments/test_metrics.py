"""Metrics carry their units: in the class, in the record, and in the records that are shipped."""

import functools
import json
import shutil
from typing import get_args

import pytest
from pydantic import ValidationError

from repro import experiments, paths
from repro.experiments import stored
from repro.experiments.base import Metrics, Number, Seconds, bands, metrics, prefixed
from repro.experiments.common import names
from repro.plan import config
from repro.records import record
from repro.records.record import Metric


@functools.cache
def shipped() -> record.Collection:
    return stored.collect(paths.root() / "results/reference/laptop-2core/records")


class Trial(metrics(Seconds | None, "after_10", "after_20"), bands(Seconds, "total")):
    share: Number
    alone: Seconds | None = None


def test_every_field_has_its_unit_and_absent_ones_are_not_recorded():
    units = {"after_10": "s", "after_20": "s", "total_low": "s", "total": "s", "total_high": "s"}
    assert Trial.units() == units | {"share": "1", "alone": "s"}
    assert prefixed("p_", Trial).units() == {f"p_{name}": unit for name, unit in Trial.units().items()}
    found = Trial(share=0.5, after_10=2, total_low=1, total=2, total_high=3).with_units()
    assert found["after_10"] == Metric(value=2, unit="s") and found["share"] == Metric(value=0.5, unit="1")
    assert found.keys() == Trial.units().keys() - {"after_20", "alone"}


@pytest.mark.parametrize("wrong", [{"shard": 1.0}, {"share": float("nan")}, {"share": None}])
def test_unknown_names_and_no_numbers_are_refused(wrong):
    with pytest.raises(ValidationError):
        Trial(**{"share": 0.5, "total_low": 1, "total": 2, "total_high": 3} | wrong)


def test_no_shipped_record_is_refused():
    """By the checks of everything that is read, such as parameters and names of metrics."""
    assert not shipped().problems


@pytest.mark.parametrize("name", experiments.names())
def test_shipped_records_hold_what_the_class_says(name):
    """Names, units, conditions, and every metric that is not optional."""
    experiment, mine = experiments.get(name), [run for run in shipped().records.values() if run.experiment == name]
    elsewhere = config.load()[0].experiments[name].tiers.keys() <= {"gpu", "cluster"}  # and nobody ran these
    assert mine or elsewhere or not experiment.timed, "nothing is shipped of this experiment"
    for run in mine:
        assert run.conditions.keys() <= set(experiment.conditions)
        if run.status == "ok":
            again = experiment.metrics(**{key: metric.value for key, metric in run.metrics.items()})
            assert again.with_units() == run.metrics


def test_a_parameter_that_a_record_lacks_has_its_default(tmp_path):
    """So runs from before and after it was added are of one setting."""
    (tmp_path / "flover_queue").mkdir()
    path = next(
        path
        for path, run in shipped().records.items()
        if run.experiment == "flover_queue" and run.point["window_s"] == 0
    )
    document = json.loads(path.read_text())
    del document["point"]["window_s"]
    end = record.name_end("flover_queue", document["point"], document["repeat"])
    (tmp_path / f"flover_queue/older-{end}.json").write_text(json.dumps(document))
    for series in path.parent.glob(f"{path.stem}.parquet"):
        shutil.copy(series, tmp_path / "flover_queue")
    found = stored.collect(tmp_path)
    assert not found.problems
    (run,) = found.records.values()
    assert run.point == shipped().records[path].point | {"window_s": 0.0}


def test_an_experiment_reports_its_metrics_and_conditions():
    experiment = experiments.get("zero_train")
    units = experiment.metrics.units()
    assert units["bytes_cluster"] == "bytes" and units["tflops_per_rank"] == "TFLOP/s"
    assert experiment.conditions == ("fabric",)
    assert all(issubclass(experiments.get(name).metrics, Metrics) for name in experiments.names())


def test_names_are_those_of_the_engines():
    from repro import scaling
    from repro.flover.buffers import LAYOUTS
    from repro.zero.plan import NAMED

    assert list(NAMED) == list(names.NAMED)
    assert list(scaling.CATALOGUE) == list(get_args(names.Hardware))
    assert set(LAYOUTS) == set(get_args(names.Layout))
