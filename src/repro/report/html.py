"""The report: one self-contained HTML file. Verdicts first, then figures, provenance, and what did not run and why."""

import base64
import html
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import yaml

from repro import __version__, experiments, paths
from repro.claims import registry as claims
from repro.files import replacing
from repro.records import provenance, record
from repro.report import figures


def _picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _sections(pictures: Path) -> list[dict[str, Any]]:
    sections = []
    for name, notebook in figures.NOTEBOOKS.items():
        files = {figure: pictures / f"{figure}.png" for figure in figures.of_notebook(name)}
        shown = [(figure, _picture(path)) for figure, path in files.items() if path.exists()]
        absent = [figure for figure, path in files.items() if not path.exists()]
        sections.append({"title": notebook.title, "paper": notebook.paper, "figures": shown, "absent": absent})
    return sections


def _machines(runs: list[record.Record]) -> list[dict[str, Any]]:
    """Distinct machines and software under the records, with the number of records of each."""
    seen: Counter[str] = Counter()
    for run in runs:
        facts = run.provenance.model_dump(
            mode="json", exclude={"start", "end", "topology", "source_hash", "hosts", "slurm"}
        )
        seen[yaml.safe_dump(facts, sort_keys=False)] += 1
    return [{"count": count, **yaml.safe_load(facts)} for facts, count in seen.most_common()]


def _other_source(runs: list[record.Record]) -> int:
    """Records made by other code than the present one: their numbers may differ if they were run again."""
    now = {name: provenance.source_hash(f"repro.experiments.{name}") for name in experiments.names()}
    return sum(run.provenance.source_hash != now.get(run.experiment) for run in runs)


def write(records: Path, pictures: Path, out: Path) -> None:
    """Write the report on `records` with the PNG files in `pictures` to `out`, atomically.

    A missing figure is named in the report; it is not an error, so that a partly failed run still has its report.
    """
    found = record.collect(records)
    runs = list(found.records.values())
    registry = claims.load()
    titles = {claim.id: claim.title for claim in registry}
    judged = claims.evaluate(registry, found.records, found.problems)
    verdicts = [verdict.model_dump(mode="json") | {"title": titles[verdict.id]} for verdict in judged]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.get_template("report.html.j2").render(
        version=__version__,
        verdicts=[row | dict(zip(("paper_text", "value_text"), claims.numbers(row), strict=True)) for row in verdicts],
        counts=Counter(row["verdict"] for row in verdicts),
        sections=_sections(pictures),
        runs=runs,
        bad=[run for run in runs if run.status != "ok"],
        experiments=Counter((run.experiment, run.evidence or run.status) for run in runs),
        machines=_machines(runs),
        other_source=_other_source(runs),
        problems=found.problems,
        records=records.relative_to(paths.root())
        if records.is_absolute() and records.is_relative_to(paths.root())
        else records,
        first=min((run.provenance.start for run in runs), default=None),
        last=max((run.provenance.end for run in runs), default=None),
        minutes=sum((run.provenance.end - run.provenance.start).total_seconds() for run in runs) / 60,
        escape=html.escape,
    )
    with replacing(out) as temporary:
        temporary.write_text(page)
