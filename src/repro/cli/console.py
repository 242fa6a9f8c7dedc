"""What the commands have in common: how errors, progress and JSON reach the terminal."""

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

stderr = Console(stderr=True)
stdout = Console()

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """What a user gave wrong ends with its message and exit code 2, not with a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        stderr.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from error


@contextlib.contextmanager
def progress(text: str) -> Iterator[Any]:
    """Spinner, bar and elapsed time on stderr (only when it is a terminal); yields update(done_fraction, text)."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def update(done_fraction: float, now: str = text) -> None:
            bar.update(task, total=1.0, completed=done_fraction, description=now)

        yield update


def emit(document: Any) -> None:
    sys.stdout.write(json.dumps(document, indent=1, default=str) + "\n")
