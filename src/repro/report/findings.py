"""What holds of each paper, in sentences whose numbers and verdicts come from records: for every page that tells it."""

from collections.abc import Sequence
from typing import Any

from repro.claims import registry
from repro.claims.registry import Verdict


def vocabulary(rows: Sequence[Verdict], where: str) -> dict[str, Any]:
    """What the sentences of a template (`where`) may use.

    said      our number beside the paper's, with both axes of the verdict: `1.4 × [1.3, 1.5] (paper 1.71 ×; ZT-1.a …)`
    ours      our number alone
    tallies   by the prefix of a paper's claims, how many agree how
    papers    by prefix

    Both functions take the id of a claim and raise ValueError for one that nobody judged.
    """
    judged = {row.id: row for row in rows}

    def numbers(claim_id: str) -> tuple[str, str]:
        if claim_id not in judged:
            raise ValueError(f"{where}: found {claim_id}; allowed: {', '.join(judged)}")
        return registry.numbers(judged[claim_id])

    def ours(claim_id: str) -> str:
        return numbers(claim_id)[1]

    def said(claim_id: str) -> str:
        paper, here = numbers(claim_id)
        found = judged[claim_id]
        theirs = "" if paper == "–" else f"{registry.whose(found)} {paper}; "
        kind = "" if found.kind == "claim" else f", a {found.kind}"
        return f"{here} ({theirs}{claim_id}{kind}: *{found.agreement}*{f', {found.scope}' if found.scope else ''})"

    prefixes = dict.fromkeys(name.split("-")[0] for name in judged)
    tallies = {p: registry.tally([row for row in rows if row.id.startswith(f"{p}-")]) for p in prefixes}
    return {"said": said, "ours": ours, "tallies": tallies, "papers": registry.papers()}
