"""What is there to run: every point of a tier with its state, expected minutes and ranks."""

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

from pydantic import AwareDatetime, BaseModel, SerializeAsAny, ValidationInfo, field_validator

from repro import experiments, files, paths
from repro.experiments import stored
from repro.experiments.base import Point
from repro.plan import config, packing
from repro.plan.packing import Allocation
from repro.records import provenance, record

_READ_MINUTES = 0.8  # for notebooks, verdicts and the report, on 2 cores
_IMPORT_MINUTES = 0.07  # until the process of an allocation has imported torch and the experiment

Predictor = Callable[[Any], float | None]  # seconds or bytes of a point
State = Literal["done", "stale", "failed", "skipped", "to run"]


class Job(BaseModel):
    """One repeat of one point.

    attempt                 number of its next run, or of its only one when it is done
    nodes, tasks_per_node   what a job starts for it
    packages                those of a node that it uses
    """

    experiment: str
    point: SerializeAsAny[Point]
    repeat: int
    record: str  # relative to the root
    state: State
    attempt: int
    minutes: float
    ranks: int
    nodes: int = 1
    packages: int = 1
    tasks_per_node: int = 1
    rank_gb: float | None = None  # predicted memory of a rank, where the platform says what it has

    @field_validator("point", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> Any:
        """A point that is read from a plan file is one of its experiment again."""
        return experiments.get(info.data["experiment"]).parameters.model_validate(value)


class FigurePlan(BaseModel):
    """What one figure costs: the jobs it shows and the minutes they take, how many of them are still to run, and the
    minutes of those. `queue` tells more where they are Slurm jobs."""

    notebook: str
    experiments: list[str]
    jobs: int
    minutes: float
    to_run: int
    minutes_left: float
    queue: "QueueCost | None" = None


class QueueCost(BaseModel):
    """Cost of what is still to run: Slurm jobs, rows of the queue's rules, hours of whole nodes and of their GPUs, and
    hours until all have run, without waiting for nodes."""

    allocations: int
    bins: list[str]
    node_hours: float
    gpu_hours: float
    wall_hours: float


class SlurmPlan(BaseModel):
    """Where allocations are Slurm jobs. `missing`: settings of the platform file without which nothing is submitted;
    `tasks_per_node`: what every job asks for, as nodes are given whole; `submission` and `beginning`: of every job, as
    `config.Slurm` quotes them."""

    settings: config.Slurm
    submission: dict[str, str | int]
    beginning: str
    tasks_per_node: int
    missing: list[str]
    cost: QueueCost


class Plan(BaseModel):
    """All jobs of a tier on a platform.

    results     where they go, relative to the root
    allocations what is still to run, as the platform runs it
    minutes     until all of that has run on this machine's cores, and figures and verdicts are made
    memory_gb   what a rank of the platform has
    unfit       how many points the platform's nodes cannot hold, by reason
    predicted   experiments whose minutes `repro.scaling` predicts where no record knows them
    """

    made: AwareDatetime
    platform: str
    tier: str
    results: str
    reference: str
    shipped: int  # records in `reference`
    outdated: int  # those of older code
    memory_gb: float | None
    jobs: list[Job]
    minutes: float
    figures: dict[str, FigurePlan]
    experiments: dict[str, bool]  # and whether their points are timed
    allocations: list[Allocation]
    unfit: dict[str, int] = {}
    predicted: list[str] = []
    slurm: SlurmPlan | None = None


def job_id(experiment: str, point: Point, repeat: int) -> str:
    """File name part of a record: readable label, repeat, and a hash of every parameter."""
    label = re.sub(r"[^A-Za-z0-9._+-]", "_", point.label)[:150]  # some parameters are texts that a user may choose
    return f"{label}-{record.name_end(experiment, point.model_dump(), repeat)}"


def state(path: Path, source: str) -> tuple[State, int]:
    """State of a record file and the attempt that comes next. A file that is no record of its point counts as not there."""
    try:
        found = stored.read(path)
    except record.RecordError:
        return "to run", 1
    if found.status == "failed":
        return "failed", found.attempt + 1
    if found.provenance.source_hash != source:
        return "stale", found.attempt
    return ("done" if found.status == "ok" else "skipped"), found.attempt


def _shipped(folder: Path) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Of the shipped records: minutes that each point took, by experiment and point, and the code (experiment and
    source hash) that made each. Those of older code count too; a file that is no record tells nothing."""
    times: dict[str, list[float]] = {}
    code = []
    for path in folder.rglob("*.json"):
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError, RecursionError):
            run = json.loads(files.read(path))  # not `record.read`: 550 of them take half a second to check
            start, end = (datetime.fromisoformat(run["provenance"][name]) for name in ("start", "end"))
            code.append((str(run["experiment"]), run["provenance"]["source_hash"]))
            times.setdefault(_key(run["experiment"], run["point"]), []).append((end - start).total_seconds() / 60)
    return {key: median(values) for key, values in times.items()}, code


def _key(experiment: str, point: dict[str, Any]) -> str:
    return json.dumps([experiment, point], sort_keys=True)


def _predictors(hardware: str | None, file: str) -> dict[str, Predictor]:
    """By experiment, what predicts its points on the platform's hardware."""
    if hardware is None:
        return {}
    from repro import scaling  # scipy and torch: only where a platform asks for it

    if hardware not in scaling.CATALOGUE:
        raise config.ConfigError(f"{file}: hardware: found {hardware!r}, allowed: {', '.join(scaling.CATALOGUE)}")
    found = [each for name in experiments.names() for each in experiments.get(name).predicts.items()]
    return {name: partial(predict, hardware=hardware) for name, predict in found}


def _predicted(predict: Predictor, point: Point, where: str) -> float | None:
    """Seconds or bytes of a point; ConfigError where its numbers are beyond what predicts them."""
    try:
        return predict(point)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise config.ConfigError(f"{where}: {point.label}: {error}") from error


def _jobs(
    experiment: str,
    grid: config.Grid,
    results: str,
    minutes: dict[str, float],
    source: str,
    where: str,
    predict: Predictor | None = None,
    occasion: int = 1,
) -> list[Job]:
    jobs = []
    for point in config.points(experiment, grid, where):
        shape = point.shape
        nodes, in_node = (1, 1) if point.one_machine else (shape.nodes, shape.in_node)
        expected = minutes.get(_key(experiment, point.model_dump()))
        if expected is None:
            seconds = None if predict is None else _predicted(predict, point, where)
            expected = grid.minutes if seconds is None else seconds / 60
        for repeat in _repeats(experiment, grid, occasion):
            path = f"{results}/records/{experiment}/{job_id(experiment, point, repeat)}.json"
            found, attempt = state(paths.root() / path, source)
            jobs.append(
                Job(
                    experiment=experiment,
                    point=point,
                    repeat=repeat,
                    record=path,
                    state=found,
                    attempt=attempt,
                    minutes=round(expected, 3),
                    ranks=shape.ranks,
                    nodes=nodes,
                    packages=shape.packages if in_node > 1 else 1,
                    tasks_per_node=in_node,
                )
            )
    return jobs


def _repeats(experiment: str, grid: config.Grid, occasion: int) -> list[int]:
    """Repeats of a point: those of the first occasion; and of timed points that are repeated, those of this one."""
    first = list(range(grid.repeats))
    if occasion == 1 or grid.repeats == 1 or not experiments.get(experiment).timed:
        return first
    return [*first, *((occasion - 1) * grid.repeats + repeat for repeat in first)]


def _interleaved(jobs: Sequence[Job]) -> list[Job]:
    """Timed points, repeat by repeat and every other time from the last to the first: what is compared runs near each
    other, and a machine that grows slower does so for both sides."""
    rounds: dict[int, list[Job]] = {}
    for job in jobs:
        rounds.setdefault(job.repeat, []).append(job)
    return [job for number in sorted(rounds) for job in (rounds[number][::-1] if number % 2 else rounds[number])]


def make(
    tier: str | None = None,
    platform: str | None = None,
    figures: Mapping[str, tuple[str, Sequence[str]]] | None = None,
    occasion: int = 1,
) -> Plan:
    """The plan of a tier on a platform. `figures`: name → its notebook and the experiments whose records it shows, for
    totals per figure. `occasion`: 2 or more adds that many-th occasion of the timed points that are repeated.
    ConfigError for anything wrong in `config/`, for a tier without points, and for an occasion below 1."""
    if not 1 <= occasion <= 1000:
        raise config.ConfigError(f"--occasion: found {occasion}; allowed: 1 to 1000")
    settings, where = config.load(tier, platform)
    full = [name for name in get_args(config.Tier) if any(e.tiers.get(name) for e in settings.experiments.values())]
    if settings.tier not in full:
        raise config.ConfigError(
            f"tier {settings.tier!r} has no points in config/config.yaml; those that have: {', '.join(full)}"
        )
    results = config.results_folder(settings, where)
    minutes, shipped = _shipped(paths.root() / "results/reference" / settings.reference / "records")
    file = f"config/platforms/{settings.platform}.yaml"
    predictors = _predictors(where.hardware, file)
    jobs = []
    for name, experiment in settings.experiments.items():
        source = provenance.source_hash(f"repro.experiments.{name}")
        place = f"config/config.yaml: experiments.{name}"
        mine: list[Job] = []
        for grid in experiment.grids(settings.tier):
            mine += _jobs(name, grid, results, minutes, source, place, predictors.get(name), occasion)
        mine = list({job.record: job for job in mine}.values())  # overlapping grids name the same point once
        jobs += _interleaved(mine) if experiments.get(name).timed else mine
    for job in jobs if where.memory_gb is not None else []:
        place = f"config/config.yaml: experiments.{job.experiment}"
        nbytes = _predicted(experiments.get(job.experiment).memory, job.point, place)
        job.rank_gb = None if nbytes is None else round(nbytes / 1e9, 2)
    fit, unfit = _fitting(jobs, where)
    try:
        allocations = packing.pack(filter(unfinished, fit), where.slurm or where.packing)
    except config.ConfigError as error:
        raise config.ConfigError(f"{file}: {error}") from error
    return Plan(
        made=provenance.now(),
        platform=settings.platform,
        tier=settings.tier or "",
        results=results,
        reference=f"results/reference/{settings.reference}",
        shipped=len(shipped),
        outdated=provenance.outdated(shipped, settings.experiments),
        memory_gb=where.memory_gb,
        jobs=fit,
        minutes=minutes_of(list(filter(unfinished, fit))),
        allocations=allocations,
        figures={name: _figure(*entry, fit, where, allocations) for name, entry in (figures or {}).items()},
        experiments={name: experiments.get(name).timed for name in settings.experiments},
        unfit=unfit,
        predicted=sorted(predictors.keys() & {job.experiment for job in fit}),
        slurm=_slurm(allocations, where, file),
    )


def _fitting(jobs: list[Job], platform: config.Platform) -> tuple[list[Job], dict[str, int]]:
    """The jobs that the platform's nodes can hold, and how many they cannot, by reason."""
    if platform.node is None:
        return jobs, {}
    fit, reasons = [], Counter[str]()
    for job in jobs:
        reason = packing.unfit(job.point.shape, job.point.one_machine, platform.node)
        if reason is None and (job.rank_gb or 0) > (platform.memory_gb or math.inf):
            reason = f"more than the {platform.memory_gb:g} GB of a rank"
        if reason is None:
            fit.append(job)
        else:
            reasons[f"{job.experiment}: {reason}"] += 1
    return fit, dict(reasons)


def unfinished(job: Job) -> bool:
    """Whether a driver has to run it."""
    return job.state not in ("done", "skipped")


def minutes_of(jobs: Sequence[Job], cores: int = os.cpu_count() or 1) -> float:
    """Until points have run as local processes: timed ones alone on the machine, of the others one a core."""
    total = _READ_MINUTES
    for allocation in packing.pack(jobs, config.Packing()):
        timed = experiments.get(allocation.experiment).timed
        total += (allocation.expected + _IMPORT_MINUTES) / (1 if timed else cores)
    return round(total, 2)


def _slurm(allocations: list[Allocation], platform: config.Platform, file: str) -> SlurmPlan | None:
    if (slurm := platform.slurm) is None or platform.node is None:
        return None
    unset = [name for name in slurm.needs if not getattr(slurm, name)]
    return SlurmPlan(
        settings=slurm,
        submission=slurm.submission,
        beginning=slurm.beginning,
        tasks_per_node=platform.node.ranks,
        missing=[f"{file}: slurm.{name}: not set; jobs need one here" for name in unset],
        cost=_cost(allocations, platform),
    )


def _cost(allocations: list[Allocation], platform: config.Platform) -> QueueCost:
    assert platform.slurm is not None and platform.node is not None
    node_hours = sum(allocation.node_hours for allocation in allocations)
    return QueueCost(
        allocations=len(allocations),
        bins=sorted({allocation.bin for allocation in allocations}),
        node_hours=round(node_hours, 2),
        gpu_hours=round(node_hours * platform.node.ranks, 2),
        wall_hours=round(packing.wall_hours(allocations, platform.slurm.running_jobs), 2),
    )


def _figure(
    notebook: str, reads: Sequence[str], jobs: list[Job], platform: config.Platform, allocations: list[Allocation]
) -> FigurePlan:
    mine = [job for job in jobs if job.experiment in reads]
    to_run = list(filter(unfinished, mine))
    cost = _cost([a for a in allocations if a.experiment in reads], platform) if platform.slurm is not None else None
    return FigurePlan(
        notebook=notebook,
        experiments=list(reads),
        jobs=len(mine),
        minutes=round(sum(job.minutes for job in mine), 2),
        to_run=len(to_run),
        minutes_left=round(sum(job.minutes for job in to_run), 2),
        queue=cost,
    )


def arguments(job: Job) -> list[str]:
    """Arguments of `repro run` for a job, defaults included: a later change of a default does not change the job."""
    flags: list[Any] = [job.experiment]
    for key, value in job.point:
        flags += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    return [*flags, "--repeat", str(job.repeat), "--attempt", str(job.attempt)]
