"""What is there to run: every point of a tier with its state, expected minutes and ranks."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from repro import experiments, paths
from repro.emulate import netns
from repro.experiments import stored
from repro.experiments.base import Point
from repro.plan import config, expected, packing
from repro.plan.models import FigurePlan, Job, Plan, QueueCost, SlurmPlan, State
from repro.plan.packing import Allocation
from repro.records import provenance, record, statistics

_READ_MINUTES = 0.8  # for notebooks, verdicts and the report, on 2 cores
_IMPORT_MINUTES = 0.07  # until the process of an allocation has imported torch and the experiment


def job_id(experiment: str, point: Point, repeat: int) -> str:
    """File name part of a record: readable label, repeat, and a hash of every parameter."""
    label = re.sub(r"[^A-Za-z0-9._+-]", "_", point.label)[:150]  # some parameters are texts that a user may choose
    return f"{label}-{record.name_end(experiment, point.model_dump(), repeat)}"


def state(path: Path, here: bool = False) -> tuple[State, int]:
    """State of a record file and the attempt that comes next. A file that is no record of its point counts as not there.
    `here`: points run on this machine, and what ran without shaped links is stale if it can shape them now."""
    try:
        found = stored.read(path)
    except record.RecordError:
        return "to run", 1
    if found.status == "failed":
        return "failed", found.attempt + 1
    if provenance.older({path: found}) or (here and _lacked_links(found)):
        return "stale", found.attempt
    return ("done" if found.status == "ok" else "skipped"), found.attempt


def _lacked_links(found: record.Record) -> bool:
    """Whether it ran over links that were not shaped, which this machine can shape now."""
    wanted = found.status == "ok" and found.point.get("fabric") == "auto"
    return wanted and found.conditions.get("fabric", "").startswith("unshaped") and netns.unavailable() is None


def _jobs(
    experiment: str,
    grid: config.Grid,
    results: str,
    minutes: dict[str, float],
    where: str,
    predict: expected.Predictor | None = None,
    occasion: int = 1,
    here: bool = False,
) -> list[Job]:
    jobs = []
    for point in config.points(experiment, grid, where):
        shape = point.shape
        nodes, in_node = (1, 1) if point.one_machine else (shape.nodes, shape.in_node)
        likely = minutes.get(expected.key(experiment, point.model_dump()))
        if likely is None:
            seconds = None if predict is None else expected.predicted(predict, point, where)
            likely = grid.minutes if seconds is None else seconds / 60
        for repeat in _repeats(experiment, grid, occasion):
            path = f"{results}/records/{experiment}/{job_id(experiment, point, repeat)}.json"
            found, attempt = state(paths.root() / path, here)
            jobs.append(
                Job(
                    experiment=experiment,
                    point=point,
                    repeat=repeat,
                    occasion=1 if repeat < grid.repeats else occasion,
                    record=path,
                    state=found,
                    attempt=attempt,
                    minutes=round(likely, 3),
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
    other, and a machine that grows slower does so for both sides. Those that are not repeated come last."""
    again = {job.point for job in jobs if job.repeat}
    order = {point: place for place, point in enumerate(dict.fromkeys(job.point for job in jobs))}
    rounds: dict[int, list[Job]] = {}
    single = []
    for job in sorted(jobs, key=lambda job: order[job.point]):  # grids that overlap have some repeats of a point each
        (rounds.setdefault(job.repeat, []) if job.point in again else single).append(job)
    mixed = [job for number in sorted(rounds) for job in (rounds[number][::-1] if number % 2 else rounds[number])]
    return [*mixed, *single]


def make(
    tier: str | None = None,
    platform: str | None = None,
    figures: Mapping[str, tuple[str, Sequence[str]]] | None = None,
    occasion: int = 1,
    only: Callable[[list[Job], str], list[Job]] | None = None,
) -> Plan:
    """The plan of a tier on a platform. `figures`: name → its notebook and the experiments whose records it shows, for
    totals per figure. `occasion`: 2 or more adds that occasion of the timed points that are repeated. `only`: chooses from
    the points of the tier, which it is told.
    ConfigError for anything wrong in config.yaml or the platform's file, for a tier without points, and for an occasion that no
    verdict reads."""
    settings, where = _checked(tier, platform, occasion)
    results = config.results_folder(settings, where)
    minutes, shipped = expected.shipped(paths.root() / settings.shipped / "records")
    file = f"config/platforms/{settings.platform}.yaml"
    predictors = expected.predictors(where.hardware, file)
    jobs: list[Job] = []
    for name, experiment in settings.experiments.items():
        place = f"config/config.yaml: experiments.{name}"
        mine: dict[str, Job] = {}  # overlapping grids name the same point once, of the first of its occasions
        for grid in experiment.grids(settings.tier):
            for job in _jobs(name, grid, results, minutes, place, predictors.get(name), occasion, where.slurm is None):
                same = mine.setdefault(job.record, job)
                same.occasion = min(same.occasion, job.occasion)
        jobs += _interleaved([*mine.values()]) if experiments.get(name).timed else mine.values()
    if only is not None:
        jobs = only(jobs, settings.tier)
    if where.memory_gb is not None:
        _predict_memory(jobs)
    fit, unfit = _fitting(jobs, where)
    try:
        allocations = packing.pack(filter(unfinished, fit), where.slurm or config.Packing())
    except config.ConfigError as error:
        raise config.ConfigError(f"{file}: {error}") from error
    return Plan(
        made=provenance.now(),
        platform=settings.platform,
        tier=settings.tier or "",
        results=results,
        reference=settings.shipped,
        shipped=len(shipped),
        outdated=sum(provenance.is_older(*code) for code in shipped),
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


def _checked(tier: str | None, platform: str | None, occasion: int) -> tuple[config.Config, config.Platform]:
    """The configuration, whose tier has points. ConfigError for one without, and for an occasion beyond the last."""
    if not 1 <= occasion <= statistics.OCCASIONS:
        raise config.ConfigError(
            f"--occasion: found {occasion}; allowed: 1 to {statistics.OCCASIONS}, as many as a verdict reads"
        )
    settings, where = config.load(tier, platform)
    known = [name for name in get_args(config.Tier) if any(e.tiers.get(name) for e in settings.experiments.values())]
    if settings.tier not in known:
        raise config.ConfigError(
            f"tier {settings.tier!r} has no points in config/config.yaml; those that have: {', '.join(known)}"
        )
    return settings, where


def _predict_memory(jobs: Sequence[Job]) -> None:
    """Of a rank, in GB, where the experiment of a job says how."""
    for job in jobs:
        place = f"config/config.yaml: experiments.{job.experiment}"
        nbytes = expected.predicted(experiments.get(job.experiment).memory, job.point, place)
        job.rank_gb = None if nbytes is None else round(nbytes / 1e9, 2)


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
    """Minutes until points have run as local processes (timed ones alone on the machine, of the others one a core), and
    notebooks, verdicts and the report are made."""
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
