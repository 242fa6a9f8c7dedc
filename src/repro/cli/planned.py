"""How `repro plan` shows a plan, and keeps it for Snakemake."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Column, Table

from repro import experiments, paths
from repro.cli.console import stdout
from repro.files import replacing
from repro.plan import jobs
from repro.plan.models import Job, Plan
from repro.records import provenance
from repro.records.statistics import OCCASIONS
from repro.report import figures

DAY_HOURS = 8  # a figure that takes longer on a cluster is marked
_PAGE = (".j2", ".css", ".js")
_KEPT_DAYS = 60  # longer than any job waits in a queue


def document(found: Plan) -> dict[str, Any]:
    """The plan for programs: also titles of the notebooks; a hash of all that decides what is shown of records: the code
    of `repro.report` with what it uses (the catalogue of figures among it), what the report's page is made of, and the
    code of the experiments, by which records are of older code or not; and one of the shipped records, which stand beside
    those of a run."""
    page = sorted(path for path in (figures.CATALOGUE.parents[1] / "page").glob("[!.]*") if path.suffix in _PAGE)
    modules = [f"repro.experiments.{name}" for name in experiments.names()]
    present = [code(module).encode() for module in modules for code in (provenance.source_hash, provenance.gpu_hash)]
    parts = (provenance.source_hash("repro.report"), provenance.file_hash(*page), provenance.digest(*present))
    titles = {name: notebook.title for name, notebook in figures.NOTEBOOKS.items()}
    beside = provenance.file_hash(*sorted((paths.root() / found.reference / "records").glob("*/*.json")))
    return found.model_dump() | {"notebooks": titles, "reader": "-".join(parts), "shipped_hash": beside}


def keep(text: str) -> Path:
    """Write a plan where no later one replaces it: one call of Snakemake and its jobs read it. Removes those that no
    job can need. Path relative to the root."""
    folder = paths.root() / "results/plans"
    for old in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another call may remove it, too
            if time.time() - old.stat().st_mtime > _KEPT_DAYS * 86400:
                old.unlink()
    file = folder / f"{provenance.digest(text.encode())}.json"
    with replacing(file) as temporary:
        temporary.write_text(text, "utf-8")
    return file.relative_to(paths.root())


def show(found: Plan, points: bool) -> None:
    """Totals, then figures, then where `points` asks for them all points."""
    to_run = list(filter(jobs.unfinished, found.jobs))
    lines = [f"{found.platform}, tier {found.tier}: {len(to_run)} of {len(found.jobs)} points to run"]
    if found.slurm is None:
        of_all = f", {jobs.minutes_of(found.jobs):.0f} when nothing is done" if len(to_run) < len(found.jobs) else ""
        lines[0] += f", about {found.minutes if to_run else 0:.0f} minutes{of_all}"
    else:
        cost = found.slurm.cost
        lines.append(
            f"as Slurm jobs: {cost.allocations} ({'; '.join(cost.bins)}), {cost.node_hours:.1f} node-hours, "
            f"{cost.gpu_hours:.1f} GPU-hours; {cost.wall_hours:.1f} h with {found.slurm.settings.running_jobs} at a "
            "time, waiting for nodes not counted"
        )
        if hours := _of_repeated(found.jobs):
            lines.append(
                f"of all points, done or not, the repeated ones take {hours:.1f} node-hours: verdicts on times need "
                f"{OCCASIONS} occasions, each a call of its own (docs/slurm.md)"
            )
    if found.outdated:
        older = f"{found.outdated} of {found.shipped} shipped records are of older code"
        lines.append(f"stale: {older}; their minutes still count")
    if found.predicted:
        lines.append(f"minutes of {', '.join(found.predicted)} are modelled: the slow end of a band (docs/scaling.md)")
    lines += [
        f"left out, as nodes here cannot hold them: {count} points of {reason}" for reason, count in found.unfit.items()
    ]
    for line in lines:
        stdout.print(escape(line), soft_wrap=True)
    for missing in found.slurm.missing if found.slurm else []:
        stdout.print(f"[red]{escape(missing)}[/]", soft_wrap=True)
    stdout.print(_figures(found))
    if without := [name for name, figure in found.figures.items() if not figure.jobs]:
        stdout.print(f"no points for: {', '.join(without)}", soft_wrap=True)
    if not points:
        stdout.print("every point: repro plan --points")
        return
    for name in dict.fromkeys(job.experiment for job in found.jobs):
        stdout.print(_points(name, [job for job in found.jobs if job.experiment == name], found.memory_gb))


def _of_repeated(all_jobs: list[Job]) -> float:
    """Node-hours of the points that have several repeats, without the start and the end of their jobs."""
    again = {job.point for job in all_jobs if job.repeat}
    repeated = (job for job in all_jobs if job.point in again)
    return sum(job.nodes * job.minutes / 60 for job in repeated)


def _figures(found: Plan) -> Table:
    """A row per figure that has points; on a cluster with its cost, and whether that is done in a working day."""
    last = ["jobs", "node-h", "GPU-h", "queue", f"in {DAY_HOURS} h"] if found.slurm else ["minutes", "left"]
    table = Table(*(Column(name, no_wrap=True) for name in ("figure", "points", "to run", *last)), box=box.SIMPLE_HEAD)
    table.padding = (0, 2, 0, 0)
    for name, figure in found.figures.items():
        if not figure.jobs:
            continue
        row = [name, str(figure.jobs), str(figure.to_run)]
        if (cost := figure.queue) is not None:
            day = "yes" if cost.wall_hours <= DAY_HOURS else f"[red]{cost.wall_hours:.1f} h[/]"
            row += [str(cost.allocations), f"{cost.node_hours:.1f}", f"{cost.gpu_hours:.1f}", "\n".join(cost.bins), day]
        else:
            row += [f"{figure.minutes:.1f}", f"{figure.minutes_left:.1f}"]
        table.add_row(*row)
    return table


def _points(experiment: str, mine: list[Job], memory_gb: float | None) -> Table:
    columns = ["repeat", "state", "minutes", "ranks", *(["GB/rank"] if memory_gb else [])]
    table = Table(Column("point", overflow="fold"), *columns, title=experiment, title_justify="left")
    for job, label in zip(mine, labels(mine), strict=True):
        row = [label, str(job.repeat), job.state, f"{job.minutes:.2f}", str(job.ranks)]
        table.add_row(*row, *([_memory(job.rank_gb, memory_gb)] if memory_gb else []))
    return table


def labels(mine: list[Job]) -> list[str]:
    """Labels of an experiment's jobs; where points share one, with the parameters in which they differ."""
    found = []
    for job in mine:
        alike = [other.point for other in mine if other.point.label == job.point.label]
        differing = (f"{key}={value}" for key, value in job.point if any(getattr(a, key) != value for a in alike))
        found.append(" ".join([job.point.label, *differing]))
    return found


def _memory(rank_gb: float | None, limit: float) -> str:
    if rank_gb is None:
        return "unknown"
    return f"{rank_gb:.1f}" if rank_gb <= limit else f"[red]{rank_gb:.1f}, has {limit:g}[/]"
