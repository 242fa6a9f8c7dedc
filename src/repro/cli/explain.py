"""`repro explain`: why a claim deviates or cannot be judged, and what would decide it."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from repro.cli.console import (
    Results,
    print_older_code,
    print_problems,
    records_folder,
    results_folder,
    stdout,
    user_errors,
)

if TYPE_CHECKING:
    from repro.report.explanations import Told


def explain(
    claim: Annotated[
        str | None, typer.Argument(help="Id of a claim; without it, all that want an explanation.")
    ] = None,
    results: Results = None,
) -> None:
    """What would have to be true: from our setting to the paper's number, and the measurement that decides."""
    with user_errors():
        from repro.claims import registry
        from repro.experiments import stored
        from repro.report import explanations

        one = None if claim is None else registry.claim(claim)
        claims = registry.load()
        declared = explanations.load(claims)
        found = stored.collect(records_folder(results_folder(results)))
        print_problems(found.problems)
        rows = registry.evaluate(claims if one is None else [one], found.records, found.problems)
        if one is not None:
            return _show(explanations.tell(one, declared.get(one.id), found.records, rows[0]))
    said = []
    for row in rows:
        if row.kind == "claim" and row.agreement in explanations.OPEN:
            paper, ours = registry.numbers(row)
            said.append(f"{row.id} {row.title}: paper {paper}, here {ours}: {row.agreement}")
            stdout.print(escape(said[-1]), soft_wrap=True)
    print_older_code(said)
    stdout.print("one of them: repro explain ID")


def _show(told: "Told") -> None:
    from rich import box
    from rich.table import Table

    from repro.claims import registry
    from repro.report import explanations

    row = told.verdict
    paper, ours = registry.numbers(row)
    scope = f", {row.scope}" if row.scope else ""
    stdout.print(
        f"[bold]{row.id}[/] {escape(row.title)}: {registry.whose(row)} {paper}, here {escape(ours)}: {row.agreement}{scope}"
    )
    stdout.print(escape(told.why), soft_wrap=True)
    texts = [ours, *(number for _, number, _ in told.rungs), *(says for says, _, _ in told.tables)]
    tables = [("From our setting to the paper's", ["case", "our number", "verdict"], told.rungs)]
    for says, columns, rows in [*(tables if told.rungs else []), *told.tables]:
        stdout.print(f"\n[bold]{escape(says)}[/]", soft_wrap=True)
        table = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for each in rows:
            table.add_row(*map(escape, each))
        stdout.print(table)
    print_older_code(texts)
    if told.decides is not None:
        stdout.print(f"\n[bold]What would decide it[/] ({escape(told.decides.hardware)})")
        stdout.print(escape(told.decides.says), soft_wrap=True)
        stdout.print(escape(told.command or explanations.NO_COMMAND), soft_wrap=True)
        if told.command:
            points, minutes = explanations.cost(told.decides)
            judged = (
                "they judge this claim" if row.id in told.decides.judges else "they inform but do not judge this claim"
            )
            stdout.print(
                f"{points} of its points decide, about {minutes:.0f} minutes of runs: {judged}", soft_wrap=True
            )
