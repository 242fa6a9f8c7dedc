"""What the commands have in common: the folder of records, and how errors, progress and JSON reach the terminal."""

import contextlib
import io
import json
import locale
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from repro import files, paths

OF_FILES = 108  # columns of what goes to a file or a pipe, unless COLUMNS says otherwise: titles of claims on one line

stderr = Console(stderr=True)
_terminal = sys.stdout is not None and sys.stdout.isatty()  # none where it was closed
stdout = Console(width=None if _terminal or "COLUMNS" in os.environ else OF_FILES)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]
Results = Annotated[Path | None, typer.Option(help="Folder of records; default: the platform's, else the reference.")]


def adapt_streams() -> None:
    """Have what a terminal or pipe cannot show (PYTHONIOENCODING=ascii) shown as its number, not end the command; and what
    is printed to a stream that was closed, go nowhere."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def check_environment() -> None:
    """Refuse to read our files, which are UTF-8, as something else (Python does so in the locales of old systems), and
    to work in another checkout than that of this code.
    A `REPRO_ROOT` below the working directory holds for processes that are started in another one, too."""
    if root := os.environ.get("REPRO_ROOT"):
        os.environ["REPRO_ROOT"] = os.path.abspath(root)
    found = locale.getpreferredencoding(False)
    if found.lower() not in ("utf-8", "utf8"):
        names = ("LC_ALL", "LC_CTYPE", "LANG", "PYTHONUTF8")
        said = ", ".join(f"{name} is {os.environ[name]!r}" for name in names if name in os.environ)
        with user_errors():
            raise ValueError(f"Python reads text as {found} here ({said}), and ours is UTF-8: set PYTHONUTF8=1")
    with user_errors():
        _refuse_other_checkout()


def _refuse_other_checkout() -> None:
    """ValueError where the working directory is in a checkout with code of its own, as by the environment of another
    clone: edits there would do nothing, and records would name a commit that did not run. REPRO_ROOT says that it is
    meant."""
    own = Path(__file__).resolve().parents[3]
    if os.environ.get("REPRO_ROOT") or not (own / "config/claims.yaml").exists():  # installed without a checkout
        return
    here = paths.root().resolve()
    if here != own and (here / "src/repro").is_dir():
        raise ValueError(
            f"this is the code of {own}, and {here} has its own: run `make environment` there (if its .venv is a copy,"
            f" remove that first) and use it, or set PYTHONPATH={here}/src; REPRO_ROOT={here} has this code work there"
        )


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


def print_problems(problems: Iterable[str]) -> None:
    """Files that should have been records."""
    for problem in problems:
        stderr.print(f"[yellow]not used:[/] {escape(problem)}", soft_wrap=True)


def print_older_code(shown: Iterable[str]) -> None:
    """What the mark of numbers by older code means, where one of these texts has it."""
    from repro.claims import registry

    if marked := registry.older_code(shown):
        stdout.print(f"[dim]{marked}[/]", soft_wrap=True)


def emit(document: Any) -> None:
    sys.stdout.write(as_json(document))


def as_json(document: Any) -> str:
    """A document for programs. JSON knows neither NaN nor infinity: they are null, and stderr has their places."""

    def strict(value: Any, place: str) -> Any:
        if isinstance(value, dict):
            return {key: strict(each, f"{place}.{key}") for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [strict(each, f"{place}.{index}") for index, each in enumerate(value)]
        if isinstance(value, float) and not math.isfinite(value):
            stderr.print(f"null in the JSON: {escape(place[1:])} is {value}", soft_wrap=True)
            return None
        return value

    return json.dumps(strict(document, ""), indent=1, default=str, allow_nan=False) + "\n"


def try_output(path: Path | None, option: str = "--out") -> None:
    """Before the work whose result goes to `path`: ValueError names the option where no file can be written there."""
    try:
        if path is not None:
            files.try_writing(path)
    except OSError as error:
        raise ValueError(f"{option} {error}") from error


def results_folder(results: Path | None, shipped: bool = True) -> Path:
    """Folder with the records: the one given, else this machine's, else the shipped ones where `shipped` allows it. ValueError where the one given cannot be read, FileNotFoundError where
    there is none."""
    if results is not None:
        try:
            next(os.scandir(results), None)
        except (OSError, ValueError) as error:  # ValueError: a character that no name may have
            reason = "no such folder" if isinstance(error, FileNotFoundError) else getattr(error, "strerror", error)
            raise ValueError(f"--results {results}: cannot be read: {reason}") from error
        return results
    from repro.plan import config  # with pydantic and YAML: only where it is asked

    configured, platform = config.load()
    own = paths.root() / config.results_folder(configured, platform)
    if (own / "records").exists():
        return own
    if not shipped:
        raise FileNotFoundError(f"{own}: no records yet; run `repro reproduce`, or give --results and --out")
    return paths.root() / configured.shipped


def without_display() -> None:
    """Before anything is drawn: matplotlib would take the backend that a desktop's settings name."""
    import matplotlib

    matplotlib.use("agg")


def records_folder(folder: Path) -> Path:
    """`folder` may be the results folder or the folder of records itself."""
    return (folder / "records" if (folder / "records").is_dir() else folder).absolute()


def beside_records(folder: Path) -> Path:
    """Where pictures and the report of these records belong. ValueError where that is among the records, of which a file
    there would be read as one."""
    records = records_folder(folder)
    if records.name == "records":
        return records.parent
    if any(records.glob("*/*.json")) or any(records.glob("*.json")):
        raise ValueError(
            f"--out (and a report's --figures): found none, for the records in {records}; allowed: folders outside it"
        )
    return records
