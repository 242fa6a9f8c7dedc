"""What is there to run: every point of a tier with its state, expected minutes and ranks."""

import hashlib
import json
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from pydantic import BaseModel

from repro import claims, config, experiments, paths, provenance, record
from repro.experiments.base import Point
from repro.record import Scalar

State = Literal["done", "stale", "failed", "skipped", "to run"]


class Job(BaseModel):
    """One repeat of one point. `attempt` is the number that the next run of it will carry (the present one when it is done)."""

    experiment: str
    point: dict[str, Scalar | None]
    repeat: int
    record: str  # relative to the root
    state: State
    attempt: int
    minutes: float
    ranks: int
    rank_gb: float | None = None  # predicted memory of a rank, where the platform says what it has


class FigurePlan(BaseModel):
    """What one figure costs: the jobs it shows, how many of them are still to run, and the minutes those take."""

    notebook: str
    experiments: list[str]
    jobs: int
    to_run: int
    minutes: float


class Plan(BaseModel):
    """All jobs of a tier on a platform. `results` is where they go, relative to the root; `reader` is a hash of the code that
    turns records into figures, verdicts and the report; `memory_gb`: what a rank of the platform has."""

    platform: str
    tier: str
    results: str
    reference: str
    reader: str
    memory_gb: float | None
    jobs: list[Job]
    figures: dict[str, FigurePlan]


def job_id(experiment: str, point: Point, repeat: int) -> str:
    """File name part of a record: readable label, repeat, and a hash of every parameter."""
    text = json.dumps([experiment, point.model_dump(), repeat], sort_keys=True)
    return f"{experiments.get(experiment).label(point)}-r{repeat}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _state(path: Path, source: str) -> tuple[State, int]:
    """State of a record file and the attempt that comes next. A file that is no record counts as not there: it is run again."""
    if not path.exists():
        return "to run", 1
    try:
        found = record.read(path)
    except record.RecordError:
        return "to run", 1
    if found.status == "failed":
        return "failed", found.attempt + 1
    if found.provenance.source_hash != source:
        return "stale", found.attempt
    return ("done" if found.status == "ok" else "skipped"), found.attempt


def _known_minutes(folder: Path) -> dict[str, float]:
    """Minutes that each point took in the shipped reference records, by experiment and point."""
    times: dict[str, list[float]] = {}
    for run in record.collect(folder).records.values():
        seconds = (run.provenance.end - run.provenance.start).total_seconds()
        times.setdefault(json.dumps([run.experiment, run.point], sort_keys=True), []).append(seconds / 60)
    return {key: median(values) for key, values in times.items()}


def _jobs(
    experiment: str, grid: config.Grid, results: str, minutes: dict[str, float], source: str, where: str
) -> list[Job]:
    definition = experiments.get(experiment)
    jobs = []
    for point in config.points(experiment, grid, where):
        values = point.model_dump()
        expected = minutes.get(json.dumps([experiment, values], sort_keys=True), grid.minutes)
        for repeat in range(grid.repeats):
            path = f"{results}/records/{experiment}/{job_id(experiment, point, repeat)}.json"
            state, attempt = _state(paths.root() / path, source)
            jobs.append(
                Job(
                    experiment=experiment,
                    point=values,
                    repeat=repeat,
                    record=path,
                    state=state,
                    attempt=attempt,
                    minutes=round(expected, 3),
                    ranks=definition.ranks(point),
                )
            )
    return jobs


def make(tier: str | None = None, platform: str | None = None) -> Plan:
    """The plan of a tier on a platform; ConfigError for anything wrong in `config/`, and for a tier without points."""
    settings, where = config.load(tier, platform)
    claims.load()
    full = [name for name in get_args(config.Tier) if any(e.tiers.get(name) for e in settings.experiments.values())]
    if settings.tier not in full:
        raise config.ConfigError(
            f"tier {settings.tier!r} has no points in config/config.yaml; those that have: {', '.join(full)}"
        )
    results = config.results_folder(settings, where)
    minutes = _known_minutes(paths.root() / "results/reference" / settings.reference / "records")
    jobs = []
    for name, experiment in settings.experiments.items():
        source = provenance.source_hash(f"repro.experiments.{name}")
        for grid in experiment.grids(settings.tier):
            jobs += _jobs(name, grid, results, minutes, source, f"config/config.yaml: experiments.{name}")
    if where.memory_gb is not None:
        jobs = [job.model_copy(update={"rank_gb": _rank_gb(job)}) for job in jobs]
    unique = list({job.record: job for job in jobs}.values())  # overlapping grids name the same point once
    figures = {
        figure: _figure(name, read, unique)
        for name, notebook in settings.notebooks.items()
        for figure, read in notebook.figures.items()
    }
    return Plan(
        platform=settings.platform,
        tier=settings.tier or "",
        results=results,
        reference=f"results/reference/{settings.reference}",
        reader=_reader(),
        memory_gb=where.memory_gb,
        jobs=unique,
        figures=figures,
    )


def _rank_gb(job: Job) -> float | None:
    definition = experiments.get(job.experiment)
    nbytes = definition.memory(definition.parameters.model_validate(job.point))
    return None if nbytes is None else round(sum(nbytes.values()) / 1e9, 2)


def _reader() -> str:
    template = provenance.file_hash(Path(__file__).with_name("report.html.j2"))
    return "-".join(
        [*(provenance.source_hash(f"repro.{name}") for name in ("notebooks", "figures", "report")), template]
    )


def _figure(notebook: str, read: list[str], jobs: list[Job]) -> FigurePlan:
    mine = [job for job in jobs if job.experiment in read]
    unfinished = [job for job in mine if job.state not in ("done", "skipped")]
    minutes = round(sum(job.minutes for job in unfinished), 2)
    return FigurePlan(notebook=notebook, experiments=read, jobs=len(mine), to_run=len(unfinished), minutes=minutes)


def arguments(job: Job) -> list[str]:
    """Arguments of `repro run` for a job, defaults included, so that a later change of a default cannot change its meaning."""
    flags: list[Any] = [job.experiment]
    for key, value in job.point.items():
        flags += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return [*flags, "--repeat", str(job.repeat), "--attempt", str(job.attempt)]
