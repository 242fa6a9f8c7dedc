"""What holds of each paper, in sentences whose numbers and verdicts come from records: for every page that tells it."""

from collections.abc import Sequence
from typing import Any

from repro.claims import registry
from repro.claims.registry import Verdict

_HEADINGS = {  # of sentences, by the verdict on the claim that they are about
    "Holds here": ("reproduced", "consistent", "further"),
    "Holds in part, or not": ("same direction", "deviates"),
    "Cannot be told here": ("inconclusive", "skipped", "not run"),
}
_ASKED = "Asked by us"  # the heading of what no paper claims


def vocabulary(rows: Sequence[Verdict]) -> dict[str, Any]:
    """What the sentences of a template may use.

    said      our number beside the paper's, with both axes of the verdict: `1.4 × [1.3, 1.5] (paper 1.71 ×; ZT-1.a …)`
    ours      our number alone
    headings  of sentences: what holds, what does not, what cannot be told, what we asked
    heading_of  the heading for a claim, by its verdict, or of what we asked; without a claim, that of what cannot be told
    tallies   by the prefix of a paper's claims, how many agree how
    papers    by prefix

    The functions take the id of a claim and raise ValueError for one that nobody judged.
    """
    judged = {row.id: row for row in rows}

    def verdict(claim_id: str) -> Verdict:
        if claim_id not in judged:
            raise ValueError(f"a page of repro docs: found {claim_id}; allowed: {', '.join(judged)}")
        return judged[claim_id]

    def ours(claim_id: str) -> str:
        return registry.numbers(verdict(claim_id))[1]

    def heading_of(claim_id: str = "") -> str:
        if claim_id and verdict(claim_id).kind in ("critique", "variant"):
            return _ASKED
        agreement = verdict(claim_id).agreement if claim_id else "inconclusive"
        return next(heading for heading, agreements in _HEADINGS.items() if agreement in agreements)

    def said(claim_id: str) -> str:
        found = verdict(claim_id)
        paper, here = registry.numbers(found)
        theirs = "" if paper == "–" else f"{registry.whose(found)} {paper}; "
        kind = "" if found.kind == "claim" else f", a {found.kind}"
        return f"{here} ({theirs}{claim_id}{kind}: *{found.agreement}*{f', {found.scope}' if found.scope else ''})"

    prefixes = dict.fromkeys(name.split("-")[0] for name in judged)
    tallies = {p: registry.tally([row for row in rows if row.id.startswith(f"{p}-")]) for p in prefixes}
    sentences = {"said": said, "ours": ours, "headings": (*_HEADINGS, _ASKED), "heading_of": heading_of}
    return sentences | {"tallies": tallies, "papers": registry.papers()}
