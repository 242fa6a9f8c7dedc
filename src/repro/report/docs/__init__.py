"""Every page that a command writes: `docs/findings.md`, `docs/claims.md`, `docs/machines.md`, the appendix, the marked
parts of README, docs/flover.md and docs/scaling.md, and `codemeta.json` and `.zenodo.json`.

`pages` reads `config/`, the catalogue of figures, the plan and the shipped records below `paths.root()`, so those of
another checkout where REPRO_ROOT names it.
"""

import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from repro import files, paths
from repro.claims import compare, registry
from repro.claims.claim import KIND, TAG
from repro.claims.sides import Side
from repro.claims.verdict import AGREEMENT, SCOPE
from repro.experiments import stored
from repro.plan import config
from repro.records import statistics
from repro.report import findings
from repro.report.docs import citation, collectives, facts, latex, machines, queue, serving, steps, table

_TEMPLATES = Path(__file__).parent
_PAGES = {
    "docs/findings.md": "findings.md.j2",
    "docs/claims.md": "claims.md.j2",
    "docs/machines.md": "machines.md.j2",
    "docs/appendix/sc-ad-ae.tex": "sc-ad-ae.tex.j2",
    "docs/appendix/ctuning.tex": "ctuning.tex.j2",
    "docs/appendix/eurosys.md": "eurosys.md.j2",
}
README = "README.md"
PICTURE = "docs/primary.png"  # in README
_PARTED = (README, "docs/flover.md", "docs/scaling.md")  # pages of which a command writes parts:
# <!-- repro docs: NAME --> ... <!-- end of NAME -->, filled by part-NAME.md.j2. After NAME may stand a folder of results/reference
_PART = re.compile(
    r"(<!-- repro docs: (?P<name>[a-z]+)(?: (?P<folder>[\w-]+))? -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL
)


def pages(names: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Every generated page by its path relative to the root: whole files, and others with their marked parts filled.
    `names`: what the templates may use, where it is known already.

    ValueError (ConfigError) for anything wrong in `config/`, for a claim that a template names and nobody judged, and
    for a character that LaTeX here cannot set; jinja2.TemplateNotFound for a marked part that has no template.
    """
    said = vocabulary() if names is None else names
    found = {path: _environment(path).get_template(name).render(said) for path, name in _PAGES.items()}

    def filled(part: re.Match[str]) -> str:
        template = _environment(README).get_template(f"part-{part['name']}.md.j2")
        return f"{part[1]}{template.render(said, folder=part['folder'])}{part[4]}"

    parted = {path: _PART.sub(filled, (paths.root() / path).read_text("utf-8")) for path in _PARTED}
    return found | citation.pages() | parted


def differing() -> dict[str, bytes]:
    """Pages and README's picture that are not as the records say: path relative to the root → what belongs there."""
    wanted = {path: text.encode() for path, text in pages().items()} | {PICTURE: picture()}
    return {path: content for path, content in wanted.items() if _there(path) != content}


def write(wanted: Mapping[str, bytes]) -> None:
    """Write what `differing` found."""
    for path, content in wanted.items():
        with files.replacing(paths.root() / path) as temporary:
            temporary.write_bytes(content)


def picture() -> bytes:
    """README's picture, a PNG: the primary claims of the shipped records."""
    from repro.report.figures import base

    with tempfile.TemporaryDirectory() as folder:
        base.draw("claims_overview", f"{config.load()[0].shipped}/records", folder, primary=True)
        return (Path(folder) / "claims_overview.png").read_bytes()


def _there(path: str) -> bytes | None:
    file = paths.root() / path
    return file.read_bytes() if file.exists() else None


@cache
def _environments() -> dict[str, jinja2.Environment]:
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    same: dict[str, Any] = {"loader": loader, "undefined": jinja2.StrictUndefined, "keep_trailing_newline": True}
    same |= {"trim_blocks": True, "lstrip_blocks": True}
    tex = jinja2.Environment(
        **same,
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        finalize=latex.escape,
    )
    tex.filters |= {"code": latex.code, "plain": latex.Tex}  # plain: for verbatim
    markdown = jinja2.Environment(**same)
    markdown.filters |= {"cell": _cell}
    return {".tex": tex, ".md": markdown}


def _environment(path: str) -> jinja2.Environment:
    return _environments()[Path(path).suffix]


def _older_note(rows: Sequence[Any]) -> str:
    """What the mark on rows by older code means; empty where none is."""
    old = any(row["older"] if isinstance(row, Mapping) else row.older for row in rows)
    return f" {registry.older_code([registry.OLDER])}." if old else ""


def _cell(text: object) -> str:
    """A text for a cell of a Markdown table."""
    return str(text).replace("|", "\\|").replace("\n", " ")


def vocabulary() -> dict[str, Any]:
    """Names that the templates may use."""
    claims = registry.load()
    reference = config.load()[0].shipped
    found = stored.collect(paths.root() / reference / "records")
    if not found.records:
        said = "; ".join(found.problems) or "no records"
        raise ValueError(f"{reference}/records: found {said}; allowed: records, which the pages show")
    rows = table.rows(claims, found.records, found.problems)
    primary = [row for row in rows if row.claim.primary]
    runs, verdicts = list(found.records.values()), [row.verdict for row in rows]
    shipped = Side("shipped", paths.root() / reference, found.records, verdicts)
    papers = registry.papers()
    others = machines.others(claims, shipped)
    held_out = compare.held_out(claims, verdicts)
    return findings.vocabulary(verdicts) | {
        "rows": rows,
        "primary": primary,
        "of": {prefix: [row for row in rows if row.claim.id.startswith(f"{prefix}-")] for prefix in papers},
        "tally": registry.tally,
        "words": registry.words,
        "all_words": registry.WORDS,
        "verdicts": verdicts,
        "evidence": Counter(row.verdict.evidence or row.verdict.agreement for row in rows),
        "others": others,
        "machine_of": {machine.name: machine for machine in others},
        "spans": machines.spans(claims, shipped),
        "compared": compare.cells,
        "held_out": f"{sum(held_out)} of {len(held_out)}",
        "occasions": statistics.OCCASIONS,
        "further": facts.occasion(),
        "seeded": [row for row in primary if row.own_command.endswith("--tier full")],
        "minutes": table.minutes,
        "older_code": registry.older_code,
        "mark": registry.OLDER,
        "older_note": _older_note,
        "agreement_words": AGREEMENT,
        "scope_words": SCOPE,
        "kind_words": KIND,
        "tag_words": TAG,
        "promises": facts.promises(),
        "tiers": facts.tiers(),
        "artifacts": facts.artifacts(rows),
        "parts": facts.parts(primary),
        "serving": lambda folder: serving.settings(f"{Path(reference).parent}/{folder}"),
        "aim": serving.AIM,
        "held_out_collectives": lambda: collectives.held_out(found.records),
        "predicted_queue": lambda: queue.predicted(found.records),
        "queue_aim": queue.AIM,
        "predicted_steps": lambda folder: steps.predicted(paths.root() / Path(reference).parent / folder / "records"),
        "paper_values": {row.id: registry.numbers(row)[0] for row in verdicts},
        "sentence": compare.sentence,
        "machines": facts.machines(runs),
        "software": facts.software(runs),
        "commits": facts.commits(runs),
        "inputs": facts.inputs(),
        "records": len(runs),
        "reference": reference,
        "megabytes": facts.megabytes(paths.root() / reference / "records"),
    }
