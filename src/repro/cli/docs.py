"""`repro docs`: the pages that are written from claims, figures, plan and shipped records."""

from typing import Annotated

import typer

from repro.cli.console import progress, stderr, stdout, user_errors, without_display


def docs(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 where a page differs.")] = False,
) -> None:
    """Write docs/findings.md, docs/claims.md, docs/machines.md, docs/appendix/, codemeta.json, .zenodo.json, and the
    marked parts of README.md, docs/flover.md and docs/scaling.md, and the picture of README.md."""
    from repro.report import docs as written

    without_display()
    with user_errors(), progress("pages"):
        changed = written.differing()
        if not check:
            written.write(changed)
    for path in changed:
        stdout.print(f"{path}: {'differs' if check else 'written'}", soft_wrap=True)
    if check and changed:
        stderr.print("write them anew: repro docs")
        raise typer.Exit(1)
    if not changed:
        stdout.print("all pages are as the records say")
