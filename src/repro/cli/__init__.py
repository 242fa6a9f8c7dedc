"""The `repro` command line. A command calls one function of the package; with `--json` it prints one document."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Column, Table

from repro.cli import figures as drawing
from repro.cli.cluster import app as box_commands
from repro.cli.console import Json, emit, progress, stderr, stdout, user_errors
from repro.cli.options import Results, records_folder, results_folder
from repro.cli.place import place
from repro.files import replacing

if TYPE_CHECKING:
    from repro.plan.jobs import Plan

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

DAY_HOURS = 8  # a figure that takes longer on a cluster is marked

TierOption = Annotated[str | None, typer.Option(help="smoke, laptop, full, gpu or cluster; default: the platform's.")]
PlatformOption = Annotated[str | None, typer.Option(help="A file of config/platforms; default: config.yaml's.")]


@app.command()
def reproduce(
    target: Annotated[str | None, typer.Argument(help="Notebook, figure or file; default: everything.")] = None,
    tier: TierOption = None,
    platform: PlatformOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Snakemake's log instead of the display.")] = False,
) -> None:
    """Run what is missing, draw the figures, judge the claims, write the report."""
    from repro.cli import reproduction

    with user_errors():
        if code := reproduction.run(_planned(tier, platform), target, verbose):
            raise typer.Exit(code)


@app.command()
def doctor(json_: Json = False) -> None:
    """What this machine has, and what each tier lacks on it."""
    with user_errors(), progress("looking at this machine"):
        from repro.cli.doctor import examine

        report = examine()
    if json_:
        return emit(report.as_dict())
    table = Table(show_header=False, box=None)
    for name, value in report.as_dict().items():
        if name == "lacks":
            continue
        if isinstance(value, dict):
            value = ", ".join(
                f"{k} {v}" if v not in (True, False, None) else f"{k} {'yes' if v else 'no'}" for k, v in value.items()
            )
        empty = {"namespaces": "can be made and shaped", "model": "installed", "kernels": "can be built"}.get(
            name, "none"
        )
        table.add_row(
            name.replace("_", " "), escape(", ".join(value) if isinstance(value, list) else str(value or empty))
        )
    stdout.print(table)
    for tier, lacks in report.lacks.items():
        stdout.print(
            f"[bold]{tier:8}[/] " + ("[green]ready[/]" if not lacks else escape("lacks " + "; ".join(lacks))),
            soft_wrap=True,
        )


@app.command()
def plan(
    tier: TierOption = None,
    platform: PlatformOption = None,
    json_: Json = False,
    keep: Annotated[bool, typer.Option("--keep", hidden=True, help="Print the path of a file with the JSON.")] = False,
) -> None:
    """Every experiment point with its state, expected minutes and ranks; totals per figure."""
    from repro.plan import files, jobs

    with user_errors():
        found = _planned(tier, platform)
    if keep:
        return typer.echo(files.keep(json.dumps(_document(found), default=str)))
    if json_:
        return emit(_document(found))
    for name in dict.fromkeys(job.experiment for job in found.jobs):
        columns = ["point", "repeat", "state", "minutes", "ranks", *(["GB/rank"] if found.memory_gb else [])]
        table = Table(*columns, title=name, title_justify="left")
        for job in found.jobs:
            if job.experiment == name:
                row = [job.point.label, str(job.repeat), job.state, f"{job.minutes:.2f}", str(job.ranks)]
                table.add_row(*row, *([_memory(job.rank_gb, found.memory_gb)] if found.memory_gb else []))
        stdout.print(table)
    stdout.print(_totals(found))
    if without := [name for name, figure in found.figures.items() if not figure.jobs]:
        stdout.print(f"no point here: {', '.join(without)}", soft_wrap=True)
    open_jobs = list(filter(jobs.unfinished, found.jobs))
    stdout.print(
        f"{found.platform}, tier {found.tier}: {len(open_jobs)} of {len(found.jobs)} points to run,"
        f" about {sum(j.minutes for j in open_jobs):.1f} minutes",
        soft_wrap=True,
    )
    if found.outdated:
        stdout.print(
            f"stale: {found.outdated} of {found.shipped} shipped records are of older code; their minutes still count",
            soft_wrap=True,
        )
    if found.predicted:
        names = ", ".join(found.predicted)
        stdout.print(f"minutes of {names} are modelled: the slow end of a band (docs/scaling.md)", soft_wrap=True)
    for reason, count in found.unfit.items():
        stdout.print(f"left out, as nodes here cannot hold them: {count} points of {escape(reason)}", soft_wrap=True)
    if found.slurm is not None:
        cost = found.slurm.cost
        stdout.print(
            f"as Slurm jobs: {cost.allocations} ({'; '.join(cost.bins)}), {cost.node_hours:.1f} node-hours, "
            f"{cost.gpu_hours:.1f} GPU-hours; {cost.wall_hours:.1f} h with {found.slurm.settings.running_jobs} at a time, "
            "waiting for nodes not counted",
            soft_wrap=True,
        )
        for missing in found.slurm.missing:
            stdout.print(f"[red]{escape(missing)}[/]", soft_wrap=True)


def _planned(tier: str | None, platform: str | None) -> "Plan":
    from repro.claims import registry
    from repro.plan import jobs
    from repro.report import figures

    registry.load()  # wrong claims are to be found before hours of runs, not after
    return jobs.make(tier, platform, {name: (x.notebook, x.reads) for name, x in figures.FIGURES.items()})


def _document(found: "Plan") -> dict[str, Any]:
    """The plan for programs: also titles of the notebooks, and a hash of the code that reads records."""
    from repro.report import figures, source

    document = found.model_dump()
    titles = {name: notebook.title for name, notebook in figures.NOTEBOOKS.items()}
    return document | {"notebooks": titles, "reader": source.source_hash()}


def _totals(found: "Plan") -> Table:
    """A row per figure that has points; on a cluster with its cost, and whether that is done in a working day."""
    last = ["jobs", "node-h", "GPU-h", "queue", f"in {DAY_HOURS} h"] if found.slurm else ["notebook", "minutes"]
    columns = (Column(name, no_wrap=True) for name in ("figure", "points", "to run", *last))
    totals = Table(*columns, box=box.SIMPLE_HEAD, padding=0)
    for name, figure in found.figures.items():
        if not figure.jobs:
            continue
        row = [name, str(figure.jobs), str(figure.to_run)]
        if (cost := figure.queue) is not None:
            day = "yes" if cost.wall_hours <= DAY_HOURS else f"[red]{cost.wall_hours:.1f} h[/]"
            row += [str(cost.allocations), f"{cost.node_hours:.1f}", f"{cost.gpu_hours:.1f}", "\n".join(cost.bins), day]
        else:
            row += [figure.notebook, f"{figure.minutes:.1f}"]
        totals.add_row(*row)
    return totals


def _memory(rank_gb: float | None, limit: float) -> str:
    if rank_gb is None:
        return "unknown"
    return f"{rank_gb:.1f}" if rank_gb <= limit else f"[red]{rank_gb:.1f}, has {limit:g}[/]"


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Experiment id; an unknown one lists them.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Record file (JSON); without it the record goes to stdout.")] = None,
    repeat: Annotated[int, typer.Option(min=0, help="Number of the repeat, stored in the record.")] = 0,
    attempt: Annotated[int, typer.Option(min=1, help="Number of the attempt, stored in the record.")] = 1,
    record_failure: Annotated[
        bool, typer.Option(help="Exit 0 once a *failed* record is written (for workflows).")
    ] = False,
) -> None:
    """Run one point of one experiment and write its record."""
    with user_errors():
        from repro.cli import settings

        point = settings.point(experiment, set_ or [])
        if out is not None and out.suffix != ".json":
            raise ValueError(f"--out {out}: a record file must end in .json")
        if out is not None:  # before the work, not after it
            out.parent.mkdir(parents=True, exist_ok=True)
    with progress(f"{experiment} {point.label}"):
        from repro.jobs import runner

        found = runner.run(experiment, point, repeat, attempt, out)
    if out is None:
        emit(found.model_dump(mode="json"))
    else:
        stderr.print(
            escape(f"{experiment} {point.label}: {found.status} {found.cause or ''} -> {out}"),
            soft_wrap=True,
        )
    if found.status != "ok":
        stderr.print(escape(found.detail))
    # In a job of several ranks, the exit code makes srun end the ranks that wait for this one.
    if found.status == "failed" and not (record_failure and runner.place_in_job() is None):
        raise typer.Exit(1)


@app.command(hidden=True)
def allocation(
    plan_file: Annotated[Path, typer.Argument(help="Plan that Snakemake has written.")],
    name: Annotated[str, typer.Argument(help="Name of an allocation in it, or of one record.")],
    out: Annotated[Path | None, typer.Option(help="Written when every point has a record (JSON).")] = None,
    trial: Annotated[int, typer.Option(min=1, help="How often this allocation has been submitted.")] = 1,
) -> None:
    """Run the points of an allocation, as the plan's platform does it."""
    from repro.jobs.allocation import run
    from repro.plan import config
    from repro.plan.jobs import Plan
    from repro.plan.packing import Allocation

    with user_errors():
        found = Plan.model_validate_json(plan_file.read_text())
        known = {entry.name: entry for entry in found.allocations}
        for job in found.jobs:
            if job.record == name:
                known[name] = Allocation(
                    name=name, experiment=job.experiment, nodes=1, expected=job.minutes, jobs=[name]
                )
        if name not in known:
            raise ValueError(f"{plan_file}: no allocation {name!r}; known: {', '.join(known) or 'none'}")
        _, platform = config.load(found.tier, found.platform)
        missing = run(found, known[name], platform, trial)
    if missing:
        stderr.print(f"left to the next job: {', '.join(missing)}", soft_wrap=True)
        raise typer.Exit(1)
    if out is not None:
        with replacing(out) as temporary:
            temporary.write_text(known[name].model_dump_json(indent=1) + "\n")


STYLES = {
    "reproduced": "bold green",
    "trend only": "yellow",
    "deviates": "bold red",
    "skipped": "dim",
    "not run": "dim",
}


@app.command()
def claims(
    results: Results = None,
    details: Annotated[bool, typer.Option("--details", help="Also the reason of each verdict.")] = False,
    json_: Json = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """A verdict for every claim of the three papers."""
    from repro.claims import registry
    from repro.records import record

    with user_errors():
        folder = results_folder(results)
        found = record.collect(records_folder(folder))
        known = registry.load()
        verdicts = registry.evaluate(known, found.records, found.problems)
    rows = [verdict.model_dump(mode="json") for verdict in verdicts]
    if out is not None:
        with replacing(out) as temporary:
            temporary.write_text(json.dumps(rows, indent=1, default=str) + "\n")
    for problem in found.problems:
        stderr.print(f"[yellow]not used:[/] {escape(problem)}", soft_wrap=True)
    if json_:
        return emit(rows)
    titles = {claim.id: claim.title for claim in known}
    table = Table(
        "claim",
        "what",
        "paper",
        "ours",
        "evidence",
        "verdict",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        title=escape(f"Verdicts from {folder}"),
    )
    table.columns[1].overflow = "fold"
    if details:
        table.add_column("reason", ratio=1)
    previous = rows[0]["paper"] if rows else ""
    for row in rows:
        if row["paper"] != previous:
            table.add_section()
        previous = row["paper"]
        style = STYLES[row["verdict"]]
        cells = [row["id"], escape(titles[row["id"]]), *registry.numbers(row), row["evidence"] or ""]
        table.add_row(*cells, f"[{style}]{row['verdict']}[/]", *([escape(row["reason"])] if details else []))
    stdout.print(table)
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in STYLES}
    stdout.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if (folder / "report.html").exists():
        stdout.print(escape(f"Report: {(folder / 'report.html').resolve()}"), soft_wrap=True)


app.command()(place)
for command in (drawing.figure, drawing.notebook, drawing.report):
    app.command()(command)
app.add_typer(box_commands, name="box")


@app.command()
def schema(model: Annotated[str, typer.Argument(help="record, config, platform or claims.")] = "record") -> None:
    """Print the JSON Schema of a file, for editors and other programs."""
    from repro.cli import schemas

    with user_errors():
        sys.stdout.write(schemas.document(model))
