"""The report: one self-contained HTML file. Verdicts first, then figures, provenance, and what did not run and why."""

import base64
import json
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2

from repro import __version__, files
from repro.claims import compare, sides
from repro.claims import registry as claims
from repro.claims.claim import KIND
from repro.claims.verdict import AGREEMENT, SCOPE
from repro.experiments import stored
from repro.records import provenance, record
from repro.report import explanations, figures


def _machines(runs: list[record.Record]) -> list[dict[str, Any]]:
    """Distinct machines and software under the records, with the number of records of each."""
    of_one_run = {"start", "end", "topology", "source_hash", "hosts", "slurm"}
    seen = Counter(run.provenance.model_dump_json(exclude=of_one_run) for run in runs)
    return [{"count": count, **json.loads(facts)} for facts, count in seen.most_common()]


def write(records: Path, pictures: Path, out: Path) -> None:
    """Write the report on `records` with the PNG files in `pictures` to `out`, atomically.

    A missing figure is named in the report; it is not an error, so that a partly failed run still has its report.
    """
    found = stored.collect(records)
    runs = list(found.records.values())
    registry = claims.load()
    verdicts = claims.evaluate(registry, found.records, found.problems)
    here = sides.Side("here", records, found.records, verdicts, found.problems)
    compared = compare.section(compare.compare(registry, here, sides.shipped(registry)))
    drawn = {path.relative_to(pictures).with_suffix("").as_posix(): path for path in pictures.rglob("*.png")}
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    explained = explanations.load(registry)
    page = environment.get_template("report.html.j2").render(
        version=__version__,
        verdicts=verdicts,
        titles={claim.id: claim.title for claim in registry},
        beside={cells["name"]: cells for cells in compared["claims"]},
        explained=[
            explanations.tell(claim, explained.get(claim.id), found.records, found.problems)
            for claim, row in zip(registry, verdicts, strict=True)
            if row.kind == "claim" and row.agreement in explanations.OPEN
        ],
        meanings={"agreement": AGREEMENT, "scope": SCOPE, "kind of row": KIND},
        numbers=claims.numbers,
        mark=claims.OLDER,
        tally=claims.tally(verdicts),
        notebooks=figures.NOTEBOOKS.values(),
        pictures={name: base64.b64encode(files.read(path)).decode() for name, path in drawn.items() if path.is_file()},
        runs=runs,
        bad=[run for run in runs if run.status != "ok"],
        experiments=Counter((run.experiment, run.evidence or run.status) for run in runs),
        machines=_machines(runs),
        older=len(provenance.older(found.records)),
        problems=found.problems,
        records=claims.relative(records),
        first=min((run.provenance.start for run in runs), default=None),
        last=max((run.provenance.end for run in runs), default=None),
        minutes=sum((run.provenance.end - run.provenance.start).total_seconds() for run in runs) / 60,
    )
    with files.replacing(out) as temporary:
        temporary.write_text(page, "utf-8")
