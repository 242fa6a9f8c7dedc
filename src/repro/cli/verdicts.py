"""How `repro claims` chooses claims, and shows verdicts."""

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich import box
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from repro.claims import registry
from repro.claims.claim import Claim
from repro.claims.compare import cells
from repro.claims.document import Paper
from repro.claims.registry import Verdict
from repro.claims.sides import Row
from repro.cli.console import print_older_code, stdout
from repro.experiments import closest

_LOOKS = ("bold green", "green", "yellow", "yellow", "dim", "bold red", "dim", "dim")
STYLES = dict(zip(registry.WORDS, _LOOKS, strict=True))
ANSWERS = {"yes": "yes", "no": "[bold red]no[/]", "flipped": "[bold red]flipped[/]", "–": "[dim]–[/]"}


def chosen(claims: Sequence[Claim], which: Sequence[str], experiment: str | None) -> list[Claim]:
    """Claims whose id begins with one of `which`, or whose paper is one of them. ValueError for a word that fits none."""
    for word in which:
        if not any(_fits(claim, word) for claim in claims):
            known = ", ".join(dict.fromkeys(claim.base for claim in claims))
            near = closest(word, (claim.id for claim in claims))
            raise ValueError(f"no claim {word!r}{near}; allowed: the beginning of an id ({known}) or an arXiv number")
    found = [claim for claim in claims if not which or any(_fits(claim, word) for word in which)]
    if experiment is None:
        return found
    answered = [claim for claim in found if claim.value is not None and claim.value.experiment == experiment]
    if not answered:
        known = sorted({claim.value.experiment for claim in found if claim.value is not None})
        raise ValueError(f"--experiment: found {experiment!r}{closest(experiment, known)}; allowed: {', '.join(known)}")
    return answered


def _fits(claim: Claim, word: str) -> bool:
    return claim.paper == word or (word != "" and claim.id.startswith(word))


def show(rows: Sequence[Verdict], papers: Mapping[str, Paper], of: str, grouped: bool, reasons: bool) -> None:
    """A table for each paper, and where the records are, `of`. `grouped`: one table of the first claim of each id, and of
    the others the verdicts in words. `reasons`: lines of text instead, which are not grouped."""
    by_paper: dict[str, list[Verdict]] = {}
    for row in rows:
        by_paper.setdefault(row.id.split("-")[0], []).append(row)
    if grouped:
        table = _table(grouped)
        table.box = None  # no line: a paper's title is below the head
        for prefix, mine in by_paper.items():
            table.add_row(f"[bold]{prefix}[/]", f"[bold]{escape(papers[prefix].title)}[/]", "", "", papers[prefix].id)
            _fill(table, mine, grouped)
        stdout.print(table)
    for prefix, mine in by_paper.items() if not grouped else []:
        title = f"\n[bold]{escape(papers[prefix].title)}[/]"
        stdout.print(title, soft_wrap=True, overflow="ellipsis", no_wrap=True)
        if not reasons:
            _fill(table := _table(grouped), mine, grouped)
            stdout.print(table)
        for row in mine if reasons else []:
            paper, here = map(escape, registry.numbers(row))
            verdict = _styled(row) + (f", {row.scope}" if row.scope else "") + _note(row)
            stdout.print(
                f"{row.id} {escape(row.title)}: {registry.whose(row)} {paper}, here {here}: {verdict}", soft_wrap=True
            )
            stdout.print(Padding(Text(row.reason, "dim"), (0, 0, 0, 4)))
    print_older_code(registry.numbers(row)[1] for row in rows)
    stdout.print(". ".join(filter(None, [registry.tally(rows), f"Records: {escape(of)}"])), overflow="ignore")


def show_beside(what: str, rows: Sequence[Verdict], compared: Sequence[Row]) -> None:
    """Claims: this run's value with its kind of evidence, whether it is where the shipped ones expect it, and the shipped
    verdict."""
    beside = {row.name: row for row in compared}
    names = ("paper", "here", "as shipped", "shipped verdict")
    title = Column(what, ratio=1, overflow="fold")
    table = plain("", title, *(Column(name, no_wrap=True) for name in names))
    shown = []
    for row in rows:
        compared_row = beside[row.id]
        known = cells(compared_row)
        paper, here = registry.numbers(row, interval=False)
        here += f" {row.evidence}" if row.evidence else ""
        answer = ANSWERS["yes" if compared_row.by_other_code else known["answer"]]
        answer += registry.OLDER if compared_row.by_other_code or compared_row.outside_by_other_code else ""
        word = known["verdict_b"]
        table.add_row(row.id, escape(row.title), paper, here, answer, word)
        shown += [here, answer, word]
    stdout.print(table)
    print_older_code(shown)


def plain(*columns: str | Column) -> Table:
    """An empty table in the look that these commands share."""
    look = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "show_edge": False, "pad_edge": False, "expand": True}
    return Table(*columns, **look)


def _styled(row: Verdict) -> str:
    return f"[{STYLES[row.agreement]}]{row.agreement}[/]"


def _note(row: Verdict) -> str:
    """What the row is, unless it is an exploratory claim."""
    said = "primary" if row.primary else row.kind
    return "" if said == "claim" else f" [dim]({said})[/]"


def _table(grouped: bool) -> Table:
    what = Column("what", ratio=1, no_wrap=grouped, overflow="ellipsis" if grouped else "fold")
    first, *last = (Column(name, no_wrap=True) for name in ("claim", "paper", "here", "agreement"))
    return plain(first, what, *last)


def _fill(table: Table, rows: list[Verdict], grouped: bool) -> None:
    for base, group in groupby(rows, key=lambda row: row.id.partition(".")[0] if grouped else row.id):
        row, *others = sorted(group, key=lambda row: not row.primary)
        paper, here = registry.numbers(row, interval=not grouped)
        here += f" {row.evidence}" if grouped and row.evidence else ""
        table.add_row(base, escape(row.title) + _note(row), paper, here, _styled(row))
        if others:
            table.add_row("", f"[dim]{len(others)} more: {registry.words(others)}[/]")
