"""The report: one HTML file that needs no network. What came out first, then every verdict with all that it rests on,
the figures, and what did not run and why. Its parts are in `repro.report.page`."""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2

from repro import __version__, files, paths
from repro.claims import compare, registry, sides
from repro.claims.claim import KIND, TAG
from repro.claims.verdict import AGREEMENT, SCOPE
from repro.experiments import stored
from repro.records import provenance, record
from repro.report import explanations, figures
from repro.report.docs import machines, table
from repro.report.page import links, pictures

PAGE = Path(__file__).with_name("page")


def write(records: Path, folder: Path, out: Path) -> None:
    """Write the report on `records` with the pictures in `folder` to `out`, atomically.

    A missing figure is named in the report; it is not an error, so that a partly failed run still has its report.
    """
    found = stored.collect(records)
    claims = registry.load()
    rows = table.rows(claims, found.records, found.problems)
    explained = _explained(rows, found)
    with ThreadPoolExecutor() as pool:  # most of the time is the pictures', in C
        chapters = list(pool.map(lambda name: _chapter(name, folder, rows), figures.NOTEBOOKS))
    here = sides.Side("here", records, found.records, [row.verdict for row in rows], found.problems)
    same = records.resolve() == (sides.shipped_folder() / "records").resolve()
    shipped = here if same else sides.shipped(claims)
    loader = jinja2.FileSystemLoader(PAGE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("page.html.j2").render(
        version=__version__,
        records=registry.relative(records),
        rows=rows,
        by={row.claim.id: row for row in rows},
        papers=_papers(rows),
        verdicts=[facts(row) for row in rows],
        beside=None if same else compare.compare(claims, here, shipped),
        others=machines.others(claims, shipped),
        others_page=links.to(paths.root() / "docs/machines.md", out),
        compared=compare.cells,
        answers={"yes": "agrees", "no": "differs"},
        explained=explained,
        no_command=explanations.NO_COMMAND,
        table_at=_table_at(explained),
        mark=registry.OLDER,
        number=registry.number,
        tally=registry.tally,
        whose=registry.whose,
        all_words=registry.WORDS,
        meanings={"Agreement": AGREEMENT, "Setting": SCOPE, "Kind of row": KIND},
        tags=TAG,
        figure_of=figures.FIGURES,
        to_record=lambda name: links.to(paths.root() / name, out),
        section=lambda figure: links.section(figure, out),
        chapters=chapters,
        drawn=[one["picture"].name for chapter in chapters for one in chapter["figures"]],
        problems=found.problems,
        **_runs(found.records),
    )
    with files.replacing(out) as temporary:
        temporary.write_text(page, "utf-8")


def facts(row: table.Row) -> dict[str, str | None]:
    """A verdict as texts, for programs that read the page."""
    verdict = row.verdict
    return {
        "id": row.claim.id,
        "paper": row.stated,
        "ours": row.here.replace(registry.OLDER, ""),
        "agreement": verdict.agreement,
        "scope": verdict.scope,
        "evidence": verdict.evidence,
    }


def _papers(rows: Sequence[table.Row]) -> list[dict[str, Any]]:
    """Every paper with claims: its prefix, a short name, its title and number, what came out as pieces of text and ids of
    claims, and its rows."""
    found = []
    for prefix, paper in registry.papers().items():
        own = [row for row in rows if row.claim.id.startswith(f"{prefix}-")]
        about = {"prefix": prefix, "name": figures.name_of(paper), "title": paper.title, "id": paper.id}
        found.append({**about, "in_short": paper.pieces, "rows": own})
    return [paper for paper in found if paper["rows"]]


def _explained(rows: Sequence[table.Row], found: record.Collection) -> dict[str, explanations.Told]:
    """By id: every row with an explanation, and claims that deviate or cannot be judged."""
    return {
        row.claim.id: explanations.tell(row.claim, row.explained, found.records, verdict=row.verdict)
        for row in rows
        if row.explained or (row.claim.kind == "claim" and row.verdict.agreement in explanations.OPEN)
    }


def _table_at(explained: Mapping[str, explanations.Told]) -> dict[str, str]:
    """The first claim that shows a table, by the table's title: others that share it lead there."""
    found: dict[str, str] = {}
    for name, told in explained.items():
        for title, *_ in told.tables:
            found.setdefault(title, name)
    return found


def _chapter(notebook: str, folder: Path, rows: Sequence[table.Row]) -> dict[str, Any]:
    """A notebook's figures: drawn, the same of the shipped records where that holds more, and the claims they show."""
    found, absent = [], []
    for name, entry in figures.NOTEBOOKS[notebook].figures.items():
        shown = [row for row in rows if row.claim.id in entry.get("claims", ())]
        picture = pictures.load(folder, name, shown)
        if picture is None:
            absent.append(name)
        else:
            found.append({"picture": picture, "shipped": pictures.load(folder, f"shipped/{name}", ()), "rows": shown})
    return {"name": notebook, "about": figures.NOTEBOOKS[notebook], "figures": found, "absent": absent}


def _runs(records: dict[Path, record.Record]) -> dict[str, Any]:
    """What the page says of the runs themselves."""
    runs = list(records.values())
    return {
        "runs": runs,
        "bad": [run for run in runs if run.status != "ok"],
        "experiments": Counter((run.experiment, run.evidence or run.status) for run in runs),
        "machines": _machines(runs),
        "older": len(provenance.older(records)),
        "first": min((run.provenance.start for run in runs), default=None),
        "last": max((run.provenance.end for run in runs), default=None),
        "minutes": sum((run.provenance.end - run.provenance.start).total_seconds() for run in runs) / 60,
    }


def _machines(runs: Sequence[record.Record]) -> list[dict[str, Any]]:
    """Distinct machines with their software under the records, that of most first: its facts, how many records each
    commit made there (`commits`), and how many of these with uncommitted changes (`changed`)."""
    of_one_run = {"start", "end", "topology", "source_hash", "gpu_hash", "hosts", "slurm"}
    of_checkout = {"git_commit", "git_dirty", "config_hash"}
    found = defaultdict(list)
    for made in (run.provenance for run in runs):
        found[made.model_dump_json(exclude=of_one_run | of_checkout)].append(made)
    return [
        {
            **json.loads(facts),
            "count": len(each),
            "commits": Counter(made.git_commit for made in each).most_common(),
            "changed": sum(made.git_dirty for made in each),
        }
        for facts, each in sorted(found.items(), key=lambda item: -len(item[1]))
    ]
