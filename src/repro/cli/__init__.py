"""The `repro` command line. A command calls one function of the package; with `--json` it prints one document."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from repro import files
from repro.cli import console
from repro.cli import figures as drawing
from repro.cli.bundle import bundle, unbundle
from repro.cli.cluster import app as box_commands
from repro.cli.compare import compare
from repro.cli.console import (
    Json,
    Results,
    as_json,
    emit,
    print_problems,
    progress,
    records_folder,
    results_folder,
    stderr,
    try_output,
    user_errors,
)
from repro.cli.docs import docs
from repro.cli.explain import explain
from repro.cli.place import place

if TYPE_CHECKING:
    from repro.plan.models import Plan


class _App(typer.Typer):
    """What goes wrong with standard output, as a full disk behind it, ends with a message as well."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            try:
                return super().__call__(*arguments, **options)
            finally:
                sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
            if not isinstance(error, BrokenPipeError):  # who reads no further knows it
                what = "" if error.filename else "standard output: "  # an error about a file names it
                print(f"error: {what}{error}", file=sys.stderr)
            sys.exit(2)


console.adapt_streams()
app = _App(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

app.callback()(console.check_environment)

_MOST = 2**63 - 1  # that a record can hold
TierOption = Annotated[str | None, typer.Option(help="smoke, laptop, full, gpu or cluster; default: the platform's.")]
OccasionOption = Annotated[int, typer.Option(help="2 to 4: run the repeated timed points again, over an hour later.")]
PlatformOption = Annotated[str | None, typer.Option(help="A file of config/platforms; default: config.yaml's.")]


@app.command()
def reproduce(
    target: Annotated[
        str | None,
        typer.Argument(
            help="Claim, figure, notebook, experiment, file, or `outdated`: points without a shipped record by the present code."
            " Default: everything."
        ),
    ] = None,
    tier: TierOption = None,
    platform: PlatformOption = None,
    occasion: OccasionOption = 1,
    verbose: Annotated[bool, typer.Option("--verbose", help="Snakemake's log instead of the display.")] = False,
) -> None:
    """Run what is missing, draw the figures, judge the claims, write the report."""
    from repro.cli import reproduction

    with user_errors():
        if code := reproduction.run(_planned(tier, platform, occasion), target, verbose, occasion):
            raise typer.Exit(code)


@app.command()
def doctor(json_: Json = False) -> None:
    """What this machine has, and what each tier lacks on it."""
    with user_errors(), progress("looking at this machine"):
        from repro.cli.doctor import examine, show

        found = examine()
    if json_:
        return emit(found)
    show(found)


@app.command()
def plan(
    tier: TierOption = None,
    platform: PlatformOption = None,
    occasion: OccasionOption = 1,
    claim: Annotated[str | None, typer.Option(help="Only the points that this claim reads.")] = None,
    json_: Json = False,
    points: Annotated[bool, typer.Option("--points", help="Also every point: state, minutes, ranks.")] = False,
    keep: Annotated[bool, typer.Option("--keep", hidden=True, help="Print the path of a file with the JSON.")] = False,
) -> None:
    """What there is to run: points, minutes, figures; on a cluster also jobs and node-hours."""
    from repro.cli import planned
    from repro.plan import occasions

    with user_errors():
        found = _planned(tier, platform, occasion, claim)
    if keep:
        # Snakemake asks so, which may make targets that this does not concern; `repro reproduce` knows its own, and refuses.
        if occasion > 1 and (problem := occasions.problem(found, occasion)):
            stderr.print(problem, markup=False, soft_wrap=True)
        with user_errors():
            return typer.echo(planned.keep(as_json(planned.document(found))))
    if json_:
        return emit(planned.document(found))
    planned.show(found, points)


def _planned(tier: str | None, platform: str | None, occasion: int, claim: str | None = None) -> "Plan":
    from repro.claims import registry
    from repro.plan import jobs
    from repro.report import explanations, figures

    shown = {name: (x.notebook, x.reads) for name, x in figures.FIGURES.items()}
    only = None
    if claim is not None:
        from repro.cli import reproduction

        only = partial(reproduction.read_by, registry.claim(claim))
    found = jobs.make(tier, platform, shown, occasion, only)
    explanations.load(registry.load())  # what is wrong there is to be found before hours of runs, not after
    return found


@app.command()
def run(
    experiment: Annotated[str, typer.Argument(help="Experiment id; an unknown one lists them.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Record file (JSON); without it the record goes to stdout.")] = None,
    results: Annotated[
        Path | None, typer.Option(help="Instead of --out: a results folder, for use by figures and verdicts.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=0, max=_MOST, help="Number of the repeat, stored in the record.")] = 0,
    attempt: Annotated[int, typer.Option(min=1, max=_MOST, help="Number of the attempt, stored in the record.")] = 1,
    record_failure: Annotated[
        bool, typer.Option(help="Exit 0 once a *failed* record is written (for workflows).")
    ] = False,
) -> None:
    """Run one point of one experiment and write its record."""
    with user_errors():
        from repro.cli import settings
        from repro.plan.jobs import job_id

        point = settings.point(experiment, set_ or [])
        if results is not None:
            if out is not None:
                raise ValueError("--out and --results: found both; allowed: one of them")
            out = results / "records" / experiment / f"{job_id(experiment, point, repeat)}.json"
        if out is not None and out.suffix != ".json":
            raise ValueError(f"--out {out}: a record file must end in .json")
        from repro.jobs import runner

        place = runner.place_in_job()
        if place is None or place[0] == 0:  # else hundreds of ranks would try the same file
            try_output(out, "--out" if results is None else "--results")
    with user_errors(), progress(f"{experiment} {point.label}"):
        found = runner.run(experiment, point, repeat, attempt, out)
    if out is None:
        emit(found.model_dump(mode="json"))
    else:
        stderr.print(escape(f"{experiment} {point.label}: {found.status} {found.cause or ''} -> {out}"), soft_wrap=True)
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
    from repro.plan.models import Plan
    from repro.plan.packing import Allocation

    with user_errors():
        found = Plan.model_validate_json(files.read(plan_file))
        known = {entry.name: entry for entry in found.allocations}
        if job := next((job for job in found.jobs if job.record == name), None):
            known[name] = Allocation(name=name, experiment=job.experiment, nodes=1, expected=job.minutes, jobs=[name])
        if name not in known:
            raise ValueError(f"{plan_file}: no allocation {name!r}; known: {', '.join(known) or 'none'}")
        _, platform = config.load(found.tier, found.platform)
        missing = run(found, known[name], platform, trial)
    if missing:
        stderr.print(f"left to the next job: {', '.join(missing)}", soft_wrap=True)
        raise typer.Exit(1)
    if out is not None:
        with user_errors(), files.replacing(out) as temporary:
            temporary.write_text(known[name].model_dump_json(indent=1) + "\n", "utf-8")


@app.command(hidden=True)
def driver(results: Annotated[str, typer.Argument(help="Results of the run, as results/frontier.")]) -> None:
    """Keep other drivers from a run's Slurm jobs until standard input ends. Snakemake starts this, and submits."""
    from repro.jobs.driver import drive

    with user_errors():
        drive(results, sys.stdin)


@app.command()
def claims(
    which: Annotated[
        list[str] | None,
        typer.Argument(help="Beginnings of ids (ZT, EX-F8, FL-F4a.b) or an arXiv number; default: all."),
    ] = None,
    results: Results = None,
    agreement: Annotated[  # `registry.WORDS`, which `repro --help` would need a second to load; a test tries each
        Literal[
            "reproduced", "further", "consistent", "same direction", "inconclusive", "deviates", "skipped", "not run"
        ]
        | None,
        typer.Option(help="Only claims that agree so."),
    ] = None,
    kind: Annotated[
        Literal["claim", "self-check", "critique", "validation", "variant"] | None,
        typer.Option(help="Only rows of this kind."),
    ] = None,
    primary: Annotated[bool, typer.Option("--primary", help="Only the papers' primary claims.")] = False,
    experiment: Annotated[str | None, typer.Option(help="Only claims that this experiment answers.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--claims", help="A file with claims of your own (`repro schema claims`); default: config/claims.yaml."
        ),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Also the reason of each verdict.")] = False,
    json_: Json = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON document to this file.")] = None,
) -> None:
    """A verdict for every claim of the papers. Without a filter, ZT-1.a, ZT-1.d and so on share one row, ZT-1.

    Exit code 3: no records, or a file that is not one; the verdicts use what could be read.
    """
    from repro.claims import registry
    from repro.cli import verdicts
    from repro.experiments import stored

    with user_errors():
        folder = results_folder(results)
        try_output(out)
        known = verdicts.chosen(registry.load(file), which or [], experiment)
        found = stored.collect(records_folder(folder))
        judged = registry.evaluate(known, found.records, found.problems)
    judged = [row for row in judged if agreement in (None, row.agreement) and kind in (None, row.kind)]
    judged = [row for row in judged if row.primary or not primary]
    rows = [row.model_dump(mode="json") for row in judged]
    if out is not None:
        with user_errors(), files.replacing(out) as temporary:
            temporary.write_text(as_json(rows), "utf-8")
    print_problems(found.problems)
    if not found.records:
        stderr.print(f"[yellow]no records[/] in {escape(str(folder))}", soft_wrap=True)
    if json_:
        emit(rows)
    else:
        filtered = which or agreement or kind or primary or experiment
        of = f"{folder} (and report.html)" if (folder / "report.html").exists() and file is None else str(folder)
        verdicts.show(judged, registry.papers(file), of, grouped=not (filtered or details), reasons=details)
    if found.problems or not found.records:
        raise typer.Exit(3)


for command in (compare, place, explain, docs, bundle, unbundle, drawing.figure, drawing.notebook, drawing.report):
    app.command()(command)
app.add_typer(box_commands, name="box")


@app.command()
def schema(model: Annotated[Literal["record", "config", "platform", "claims"], typer.Argument()] = "record") -> None:
    """Print the JSON Schema of a file, for editors and other programs."""
    from repro.claims.document import Document
    from repro.plan.config import Config, Platform
    from repro.records.record import Record

    models = {"record": Record, "config": Config, "platform": Platform, "claims": Document}
    emit(models[model].model_json_schema())
