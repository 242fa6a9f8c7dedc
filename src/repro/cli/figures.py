"""`repro figure`, `repro notebook`, `repro report`: from records to what people see."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from repro.cli.console import (
    Results,
    beside_records,
    progress,
    records_folder,
    results_folder,
    stderr,
    try_output,
    user_errors,
    without_display,
)


def figure(
    name: Annotated[str, typer.Argument(help="Name of a figure; an unknown one lists them.")],
    results: Results = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the picture; default: RESULTS/figures.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the figure; may be repeated.")
    ] = None,
) -> None:
    """Draw one figure from the records, as PNG and SVG, with its texts as JSON."""
    with user_errors(), progress(f"figure {name}"):
        from repro.cli import settings
        from repro.report.figures import base, entry

        entry(name)
        without_display()
        folder = results_folder(results)
        out = (out or beside_records(folder) / "figures").absolute()
        for suffix in (".png", ".svg", ".json"):
            try_output(out / f"{name}{suffix}")
        base.draw(name, records_folder(folder), out, **settings.read(set_ or []))
    stderr.print(escape(f"figure: {out / name}.png"), soft_wrap=True)


def notebook(
    name: Annotated[str, typer.Argument(help="Name of a notebook in notebooks/.")],
    out: Annotated[Path, typer.Option(help="Folder for the executed copy, the HTML and the figures.")],
    parameter: Annotated[
        list[str] | None, typer.Option("-p", metavar="KEY=VALUE", help="A notebook parameter.")
    ] = None,
) -> None:
    """Run a notebook with papermill and keep the executed copy, its HTML and its figures."""
    from repro.cli import settings
    from repro.report import notebooks

    with user_errors(), progress(f"notebook {name}"):
        try:
            notebooks.execute(name, out, settings.read(parameter or [], option="-p"))
        except notebooks.CellError as error:
            stderr.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error


def report(
    results: Annotated[Path | None, typer.Option(help="Folder of records; default: the platform's.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder of figures; default: RESULTS/figures.")] = None,
    out: Annotated[Path | None, typer.Option(help="Default: RESULTS/report.html.")] = None,
) -> None:
    """One self-contained HTML file: verdicts, figures, provenance, what was skipped and why."""
    from repro.claims import sides
    from repro.report import html

    with user_errors():
        folder = results_folder(results, shipped=False)
        figures = figures or beside_records(folder) / "figures"
        if (
            out is None
            and not any(figures.glob("*.png"))
            and folder.resolve().is_relative_to(sides.shipped_folder().parent.resolve())
        ):
            raise ValueError(
                f"--figures: found none in {figures}; allowed: pictures of the shipped records, as `make replot` draws them"
                " into results/replot/figures (or --out, for a report without)"
            )
        out = out or beside_records(folder) / "report.html"
        try_output(out)
        html.write(records_folder(folder), figures, out)
    stderr.print(escape(f"report: {out}"), soft_wrap=True)
