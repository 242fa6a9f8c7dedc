"""`repro bundle` and `repro unbundle`: one archive with everything, and back."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from repro.cli.console import progress, stdout, try_output, user_errors


def bundle(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of a finished run, as results/laptop; default: results/replot.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Archive to write (.tar); default: below results/.")] = None,
) -> None:
    """Write one archive of this commit with a run: source, records, figures, report, environment, checksums, metadata.

    The same commit and run give the same bytes.
    """
    import hashlib

    from repro import paths
    from repro.bundle.contents import make

    with user_errors(), progress("bundle"):
        try_output(out)
        made = make(run or paths.root() / "results/replot", out)
        with made.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    stdout.print(f"{made.files} files, {made.nbytes / 1e6:.0f} MB, of commit {made.commit}", soft_wrap=True)
    stdout.print(f"{digest}  {escape(str(made.path))}", soft_wrap=True)


def unbundle(
    archive: Annotated[Path, typer.Argument(help="Archive that `repro bundle` has written.")],
    into: Annotated[Path, typer.Option(help="Folder in which a new folder appears.")] = Path(),
    check: Annotated[bool, typer.Option("--check", help="Unpack nothing, only check every member.")] = False,
) -> None:
    """Check names, links and checksums of an archive, and unpack it whole or not at all."""
    from repro.bundle import unpack

    with user_errors(), progress("checking"):
        found = unpack(archive, None if check else into)
    stdout.print(f"{found.files} files, {found.nbytes / 1e6:.0f} MB: all as the manifest says", soft_wrap=True)
    if not check:
        stdout.print(escape(f"To redraw figures and verdicts: cd {found.folder} && make replot"), soft_wrap=True)
