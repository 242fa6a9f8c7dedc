"""States of points: the plan says what Snakemake will do."""

import json
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from repro import cli, experiments
from repro.jobs import allocation
from repro.plan import config, expected
from repro.plan import jobs as plan
from repro.records import provenance, record

FIGURES = {
    "everything": ("claims", experiments.names()),
    "training": ("zero", ["zero_train"]),
    "search": ("zero", ["zero_plan"]),
}


def _finish(job, **changes):
    when, source = datetime(2026, 1, 1, tzinfo=UTC), provenance.source_hash(f"repro.experiments.{job.experiment}")
    units = experiments.get(job.experiment).metrics.units()
    fields = {
        "experiment": job.experiment, "point": job.point.model_dump(), "repeat": job.repeat, "seed": 0, "evidence": "measured",
        "status": "ok", "metrics": {name: record.Metric(value=1, unit=unit) for name, unit in units.items()},
        "attempt": job.attempt,
        "provenance": record.Provenance(start=when, end=when, source_hash=source),
    }  # fmt: skip
    return record.Record(**(fields | changes))


def test_grid_is_a_product():
    grid = config.Grid(grid={"method": ["contiguous", "random"], "gpus": [2, 4], "seed": 3})
    points = config.points("exflow_placement", grid, "here")
    assert {(p.method, p.gpus, p.seed) for p in points} == {(m, g, 3) for m in ("contiguous", "random") for g in (2, 4)}


def test_every_experiment_is_configured():
    settings, _ = config.load()
    assert set(settings.experiments) == set(experiments.names())


def test_states(project):
    jobs = plan.make("smoke").jobs
    assert {job.state for job in jobs} == {"to run"} and len(jobs) >= 5
    when = datetime(2026, 1, 1, tzinfo=UTC)
    old = record.Provenance(start=when, end=when, source_hash="other")
    record.write(_finish(jobs[0]), project / jobs[0].record)
    record.write(_finish(jobs[1], provenance=old), project / jobs[1].record)
    bad = {"evidence": None, "metrics": {}}
    record.write(_finish(jobs[2], status="failed", cause="oom", **bad), project / jobs[2].record)
    record.write(_finish(jobs[3], status="skipped", cause="missing_hardware", **bad), project / jobs[3].record)
    (project / jobs[4].record).parent.mkdir(parents=True, exist_ok=True)
    (project / jobs[4].record).write_text("{")
    found = plan.make("smoke", figures=FIGURES)
    assert [job.state for job in found.jobs[:5]] == ["done", "stale", "failed", "skipped", "to run"]
    assert [job.attempt for job in found.jobs[:5]] == [1, 1, 2, 1, 1]  # only a failed point counts up
    assert found.figures["everything"].to_run == len(jobs) - 2
    assert found.figures["training"].jobs == sum(job.experiment == "zero_train" for job in jobs)
    assert found.results == "results/laptop-smoke"


@pytest.mark.parametrize("tier", get_args(config.Tier))
def test_arguments_rebuild_the_point(project, tier):
    """What Snakemake passes to `repro run` is the point of the plan, nothing lost in text."""
    from repro.cli import settings

    for job in plan.make(tier).jobs:
        words = plan.arguments(job)
        pairs = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        assert settings.point(job.experiment, pairs) == job.point


def test_a_plan_file_gives_back_typed_points(project):
    found = plan.make("smoke", "box")
    again = plan.Plan.model_validate_json(found.model_dump_json())
    assert again == found and {type(job.point) for job in again.jobs} == {type(job.point) for job in found.jobs}
    damaged = json.loads(found.model_dump_json())
    damaged["jobs"][0]["experiment"] = 3
    with pytest.raises(ValidationError, match=r"jobs\.0\.experiment"):
        plan.Plan.model_validate(damaged)


def test_a_tier_without_points_is_an_error(project):
    file = project / "config" / "config.yaml"
    file.write_text(file.read_text().replace("      gpu:", "      cluster:"))
    with pytest.raises(config.ConfigError, match=r"'gpu' has no points.*smoke, laptop"):
        plan.make("gpu")


def test_points_that_a_platform_cannot_hold_are_left_out(project):
    """Too many GPUs in a package, or more memory than a rank has; what is left fits, and nothing is lost without a word."""
    everything = plan.make("cluster", "laptop").jobs
    found = plan.make("cluster", "frontier")
    assert len(found.jobs) + sum(found.unfit.values()) == len(everything)
    assert any("4 ranks in a package, and a package has 2" in reason for reason in found.unfit)
    assert any("more than the 64 GB of a rank" in reason for reason in found.unfit)
    assert all((job.rank_gb or 0) <= 64 and job.tasks_per_node <= 8 for job in found.jobs)
    inside = [name for allocation in found.allocations for name in allocation.jobs]
    assert sorted(inside) == sorted(job.record for job in found.jobs)


def test_cost_of_a_figure_as_jobs(project):
    found = plan.make("cluster", "frontier", FIGURES)
    cost, whole = found.figures["training"].queue, found.slurm.cost
    assert 0 < cost.node_hours < whole.node_hours and cost.gpu_hours == pytest.approx(8 * cost.node_hours, rel=1e-3)
    assert cost.allocations == sum(a.experiment in ("zero_train",) for a in found.allocations)
    assert cost.bins == ["1-91 nodes, 2 h"] and cost.wall_hours <= whole.wall_hours
    assert found.figures["search"].queue.allocations == 0
    assert plan.make("smoke").slurm is None


def test_where_memory_must_be_shared_one_task_starts_the_ranks(project):
    jobs = plan.make("smoke", "box").jobs
    shared = [job for job in jobs if getattr(job.point, "keys_values", "") == "shared"]
    assert shared and all((job.nodes, job.tasks_per_node) == (1, 1) and job.ranks > 1 for job in shared)


def test_minutes_on_a_platform_are_predicted_for_its_hardware(project):
    """Training points of 48 nodes take other times than of one, and the plan says that they are modelled."""
    found = plan.make("cluster", "frontier")
    assert found.predicted == ["zero_train"]
    minutes = {
        (job.point.plan, job.nodes): job.minutes
        for job in found.jobs
        if job.experiment == "zero_train" and job.point.hidden == 6144 and job.point.accumulation == 4
    }
    assert minutes["zero3", 48] != minutes["zero3", 8]
    assert plan.make("cluster", "laptop").predicted == []


def test_shipped_records_of_older_code_are_counted_and_still_tell_the_minutes(project):
    jobs = plan.make("smoke").jobs
    folder = project / "results/reference"
    folder.unlink()
    when = datetime(2026, 1, 1, tzinfo=UTC)
    older = record.Provenance(start=when, end=when + timedelta(minutes=7), source_hash="older")
    record.write(_finish(jobs[0], provenance=older), folder / config.load()[0].reference / "records/old.json")
    record.write(_finish(jobs[1]), folder / config.load()[0].reference / "records/new.json")
    found = plan.make("smoke")
    assert (found.shipped, found.outdated) == (2, 1) and found.jobs[0].minutes == 7 and found.jobs[0].state == "to run"
    printed = CliRunner().invoke(cli.app, ["plan", "--tier", "smoke"])
    assert "stale: 1 of 2 shipped records are of older code" in printed.stdout


def test_unknown_hardware_names_the_file_and_what_is_allowed(project):
    file = project / "config" / "platforms" / "frontier.yaml"
    file.write_text(file.read_text().replace("hardware: frontier", "hardware: cray"))
    with pytest.raises(config.ConfigError, match=r"frontier\.yaml: hardware: found 'cray', allowed: frontier"):
        plan.make("cluster", "frontier")


@pytest.mark.parametrize(("reason", "state"), [(None, "stale"), ("needs root", "done")])
def test_what_ran_without_shaped_links_runs_again_where_they_can_be_shaped(project, monkeypatch, reason, state):
    job = next(job for job in plan.make("smoke").jobs if job.experiment == "zero_train")
    record.write(_finish(job, conditions={"fabric": "unshaped: needs root"}), project / job.record)
    monkeypatch.setattr(plan.netns, "unavailable", lambda: reason)
    made = plan.make("smoke")
    assert {each.record: each.state for each in made.jobs}[job.record] == state
    assert (allocation._attempt(job, made.made, here=True) is None) == (state == "done")  # whoever runs it agrees
    assert allocation._attempt(job, made.made, here=False) is None  # a job of Slurm cannot shape links


def test_points_that_are_not_repeated_come_after_those_that_are(project):
    """Repeats are compared, so nothing is to lie between them."""
    mine = [job for job in plan.make("full").jobs if job.experiment == "zero_train"]
    again = {str(job.point) for job in mine if job.repeat}
    assert [str(job.point) in again for job in mine] == sorted((str(job.point) in again for job in mine), reverse=True)
    assert 0 < len(again) < len(mine)


def test_what_is_compared_runs_repeat_by_repeat_forwards_and_back(project):
    """A machine that grows slower does so for both sides of a pair."""
    mine = [job for job in plan.make("full", occasion=2).jobs if job.experiment == "zero_train"]
    repeats = [job.repeat for job in mine if job.point in {other.point for other in mine if other.repeat}]
    assert repeats == sorted(repeats) and set(repeats) == {0, 1, 2, 3}
    again = mine[: len(repeats)]
    first, second, third, fourth = ([job.point for job in again if job.repeat == n] for n in range(4))
    assert first == second[::-1] == third == fourth[::-1] and len(first) > 2


def test_an_occasion_is_told_of_every_point(project):
    jobs = plan.make("full", occasion=2).jobs
    assert {job.record for job in jobs if job.occasion == 1} == {job.record for job in plan.make("full").jobs}
    assert {job.repeat for job in jobs if job.occasion == 2} == {2, 3}


def test_timed_points_run_once_or_as_two_pairs_an_occasion():
    """Else the last occasion would not bring the last pair that verdicts take."""
    for name, experiment in config.load()[0].experiments.items():
        for grids in experiment.tiers.values():
            assert not experiments.get(name).timed or {grid.repeats for grid in grids} <= {1, 2}, name


def test_no_verdict_reads_a_fifth_occasion():
    with pytest.raises(config.ConfigError, match="--occasion: found 5; allowed: 1 to 4, as many as a verdict reads"):
        plan.make("laptop", occasion=5)


def test_code_for_gpus_ages_only_what_ran_on_one(project):
    jobs = plan.make("smoke").jobs
    job = next(job for job in jobs if job.experiment == "zero_train")
    module = f"repro.experiments.{job.experiment}"
    made = {
        "start": (when := datetime(2026, 1, 1, tzinfo=UTC)),
        "end": when,
        "source_hash": provenance.source_hash(module),
    }
    path = project / job.record
    for gpus, code, state in (
        ([], "", "done"),
        (["a GPU"], provenance.gpu_hash(module), "done"),
        (["a GPU"], "", "stale"),
        (["a GPU"], "older", "stale"),
    ):
        record.write(_finish(job, provenance=record.Provenance(**made, gpu=gpus, gpu_hash=code)), path)
        assert plan.state(path)[0] == state
        shipped = expected.shipped(path.parents[1])[1]
        assert [provenance.is_older(*one) for one in shipped] == [state == "stale"]


def test_what_was_skipped_says_nothing_of_the_minutes_of_a_point(project):
    [job, *_] = plan.make("smoke").jobs
    when = datetime(2026, 1, 1, tzinfo=UTC)
    made = record.Provenance(start=when, end=when + timedelta(seconds=1))
    skipped = {"status": "skipped", "cause": "missing_hardware", "metrics": {}, "evidence": None}
    record.write(_finish(job, provenance=made, **skipped), project / job.record)
    minutes, made_by = expected.shipped((project / job.record).parents[1])
    assert minutes == {} and len(made_by) == 1


def test_a_point_takes_what_a_record_from_before_one_of_its_parameters_took(project):
    [job, *_] = plan.make("smoke").jobs
    when = datetime(2026, 1, 1, tzinfo=UTC)
    made = record.Provenance(start=when, end=when + timedelta(minutes=7), source_hash="older")
    written = _finish(job, provenance=made)
    written.point.popitem()
    record.write(written, project / job.record)
    minutes, _ = expected.shipped((project / job.record).parents[1])
    assert minutes == {expected.key(job.experiment, job.point.model_dump()): 7.0}
