"""`docs/findings.md`: what holds of each paper, in sentences whose numbers and verdicts come from the shipped records."""

from collections.abc import Sequence
from pathlib import Path

import jinja2

from repro.claims import registry
from repro.claims.registry import Verdict


def text(rows: Sequence[Verdict]) -> str:
    """The findings, with the numbers of these verdicts. ValueError for a claim that the text names and nobody judged."""
    judged = {row.id: row for row in rows}

    def row(claim_id: str) -> Verdict:
        if claim_id not in judged:
            raise ValueError(f"findings.md.j2: found {claim_id}; allowed: {', '.join(judged)}")
        return judged[claim_id]

    def ours(claim_id: str) -> str:
        return registry.numbers(row(claim_id).model_dump())[1]

    def said(claim_id: str) -> str:
        """Our number beside the paper's, with both axes of the verdict: `1.4 × [1.3, 1.5] (paper 1.71 ×; ZT-1.a …)`."""
        found = row(claim_id)
        paper, here = registry.numbers(found.model_dump())
        theirs = "" if paper == "–" else f"paper {paper}; "
        return f"{here} ({theirs}{claim_id}: *{found.agreement}*{f', {found.scope}' if found.scope else ''})"

    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    template = environment.get_template("findings.md.j2")
    prefixes = dict.fromkeys(name.split("-")[0] for name in judged)
    tallies = {p: registry.tally([row for row in rows if row.id.startswith(f"{p}-")]) for p in prefixes}
    return template.render(said=said, ours=ours, tallies=tallies, papers=registry.papers())
