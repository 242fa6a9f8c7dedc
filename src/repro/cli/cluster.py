"""`repro box`: a Slurm cluster on this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from repro.cli.console import Json, emit, progress, stderr, stdout, user_errors

if TYPE_CHECKING:
    from repro.box import Box

app = typer.Typer(no_args_is_help=True, help="A Slurm cluster of virtual nodes on this machine (Linux, root).")


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="1 to 16.")] = 4,
    like: Annotated[str, typer.Option(help="Nodes of eight GCDs (frontier) or of four GPUs (nvidia).")] = "frontier",
    cluster_mbit_s: Annotated[
        float,
        typer.Option(help="A rank's share of the link between nodes; 4 times that in a node, 16 times in a package."),
    ] = 50.0,
    accounting: Annotated[bool, typer.Option(help="A database as well, for sacct.")] = False,
    install: Annotated[bool, typer.Option(help="Install what is missing, by apt-get.")] = False,
) -> None:
    """Start the cluster."""
    from repro import box

    with user_errors(), progress("starting Slurm"):
        found = box.up(box.Settings(nodes, cluster_mbit_s, accounting, like), install)  # type: ignore[arg-type]
    _show(found)
    stdout.print(f"export SLURM_CONF={escape(found.SLURM_CONF)}   # or: eval $(repro box env)", soft_wrap=True)


@app.command()
def down(
    folder: Annotated[
        Path | None, typer.Argument(help="Of a box of another checkout or user, as `status` names it.")
    ] = None,
) -> None:
    """End it and its jobs, and remove all of it, whatever state it is in. Boxes of other checkouts and users stay."""
    from repro import box

    with user_errors(), progress("ending Slurm"):
        there, left = box.down(folder), box.status()
    stderr.print("the box is down" if there else "there was no box")
    for other in left.others:
        stderr.print(escape(f"not of this checkout and user, and left alone: {other}"), soft_wrap=True)


@app.command()
def status(json_: Json = False) -> None:
    """Daemons, nodes and jobs; exit code 1 unless all nodes answer."""
    from repro import box

    with user_errors():
        found = box.status()
    if json_:
        emit(asdict(found))
    else:
        _show(found)
    if not found.up:
        raise typer.Exit(1)


@app.command()
def env() -> None:
    """What a shell needs to talk to it: `eval $(repro box env)`."""
    from repro import box

    with user_errors():
        print(f"export SLURM_CONF={box.configuration()}")


def _show(found: "Box") -> None:
    table = Table(show_header=False, box=None)
    table.add_row("box", "[green]up[/]" if found.up else "[red]not up[/]")
    table.add_row("daemons", ", ".join(f"{count} {name}" for name, count in found.daemons.items()) or "none")
    table.add_row("nodes", ", ".join(f"{name} {state}" for name, state in found.nodes.items()) or "none")
    table.add_row("jobs", ", ".join(found.jobs) or "none")
    if found.others:
        table.add_row("others", escape("\n".join(found.others)))
    stdout.print(table)
