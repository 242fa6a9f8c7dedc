"""`repro compare`: two folders of records side by side, the differences first."""

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.markup import escape
from rich.table import Column

from repro.cli.console import Json, emit, print_problems, stderr, stdout, user_errors

if TYPE_CHECKING:
    from repro.claims.compare import Comparison
    from repro.claims.sides import Row

_NAMED, _FEW = 8, 3  # differences, and records without a partner, that one screen names


def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder of records, or a tier, or a folder below results/.")],
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="What A is held to; default: the shipped records.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every claim, metric and record, not one screen.")] = False,
    json_: Json = False,
) -> None:
    """Both values of every claim and metric that A and B hold, and whether A's lies where B's runs allow it.

    Exit code 0: nothing that can be told lies outside or has another verdict; 1: something does; 2: bad input, as a file
    that is no record, or nothing that both hold.
    """
    from repro.claims import compare, registry, sides

    with user_errors():
        claims = registry.load()
        folders = folder_of("A", a), folder_of("B", b) if b is not None else sides.shipped_folder()
        found = compare.compare(claims, *(sides.read(n, f, claims) for n, f in zip("AB", folders, strict=True)))
    problems = [*found.a.problems, *found.b.problems]
    _name_problems(problems, all_)
    if json_:
        emit(document(found))
    else:
        show(found, all_)
    if found.differing:
        raise typer.Exit(1)
    if problems:
        raise typer.Exit(2)
    if not found.told:
        stderr.print("[bold red]error:[/] nothing could be compared", soft_wrap=True)
        raise typer.Exit(2)


def _name_problems(problems: list[str], everything: bool) -> None:
    shown = problems if everything else problems[:_FEW]
    print_problems(shown)
    if len(problems) > len(shown):
        stderr.print(f"[yellow]not used:[/] {len(problems) - len(shown)} more files (--all names them)", soft_wrap=True)


def folder_of(name: str, word: str) -> Path:
    """A folder by its path, by its name below results/ or results/reference/, or by its tier on this platform.
    ValueError says which there are."""
    from repro import paths
    from repro.plan import config

    results = paths.root() / "results"
    candidates = [Path(word), results / word, results / "reference" / word]
    if word in get_args(config.Tier):
        candidates.append(paths.root() / config.results_folder(*config.load(word)))
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        known = [path.relative_to(paths.root()) for path in sorted([*results.glob("*"), *results.glob("reference/*")])]
        listed = ", ".join(str(path) for path in known if (paths.root() / path / "records").is_dir())
        raise ValueError(f"{name}: found {word}, which is no folder; allowed: a folder of records, as {listed}")
    try:
        next(os.scandir(found), None)
    except OSError as error:
        raise ValueError(f"{name}: {word}: cannot be read: {error.strerror}") from error
    if not any(found.rglob("*.json")):
        raise ValueError(f"{name}: no records in {found}")
    return found


def document(found: "Comparison") -> dict[str, Any]:
    """A comparison for programs."""
    sides = {
        side.name.lower(): {"folder": str(side.folder), "records": len(side.records), "problems": list(side.problems)}
        for side in (found.a, found.b)
    }
    rows = {"claims": found.claims, "metrics": found.metrics}
    listed = {key: [vars(row) | {"ratio": row.ratio} for row in each] for key, each in rows.items()}
    return sides | listed | {"only_a": found.only_a, "only_b": found.only_b, "differing": len(found.differing)}


def show(found: "Comparison", everything: bool) -> None:
    """The two folders, a table of the primary claims (or of all), and `summarise`."""
    from repro.claims.registry import relative

    for side in (found.a, found.b):
        stdout.print(f"{side.name}: {escape(relative(side.folder))}, {len(side.records)} records", soft_wrap=True)
    stdout.print()
    held = [row for row in found.claims if row.primary and (row.a, row.b) != (None, None)]
    _table("claim", found.claims if everything else held)
    if everything:
        _table("metric of a record", found.metrics)
    summarise(found, everything)


def summarise(found: "Comparison", everything: bool = False) -> None:
    """In sentences: what agrees and what cannot be told; by name, what differs and which records have no partner."""
    for line in found.says:
        stdout.print(line, soft_wrap=True)
    lines = [_difference(row, found) for row in found.differing] if everything else _by_record(found)
    for line in lines[: None if everything else _NAMED]:
        stdout.print(f"[bold red]differs[/] {escape(line)}", soft_wrap=True)
    if not everything and len(lines) > _NAMED:
        stdout.print(f"and {len(lines) - _NAMED} more that differ (repro compare A --all)", soft_wrap=True)
    for side, names in ((found.a, found.only_a), (found.b, found.only_b)):
        if names:
            shown = names if everything else names[:_FEW]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            stdout.print(f"only {side.name}: {escape(', '.join(shown))}{more}", soft_wrap=True)


def _by_record(found: "Comparison") -> list[str]:
    """A line for each claim that differs, then for each record the first of its metrics that do."""
    lines = []
    for _, rows in itertools.groupby(found.differing, key=lambda row: row.name):
        first, *others = rows
        lines.append(_difference(first, found) + (f"; and {len(others)} more metrics of this record" if others else ""))
    return lines


def _difference(row: "Row", found: "Comparison") -> str:
    from repro.claims.compare import cells

    text = cells(row)
    flip = f"; verdict {text['verdict_a']}, {found.b.name} {text['verdict_b']}" if row.flipped else ""
    values = f"{found.a.name} {text['a']}, {found.b.name} {text['b']}, ratio {text['ratio']}"
    return f"{row.name} {row.title}: {values}: {text['said']}{flip}"


def _table(first: str, rows: list["Row"]) -> None:
    if not rows:
        return
    from repro.claims.compare import cells
    from repro.cli.verdicts import ANSWERS, plain

    what = Column("what", ratio=1, no_wrap=True, overflow="ellipsis")
    names = ("A", "B", "A ÷ B", "allowed for A", "agrees")
    table = plain(first, what, *(Column(name, no_wrap=True) for name in names))
    for row in rows:
        text = cells(row)
        numbers = (text[key] for key in ("a", "b", "ratio", "allowed"))
        table.add_row(row.name, escape(row.title), *numbers, ANSWERS[text["answer"]])
    stdout.print(table)
