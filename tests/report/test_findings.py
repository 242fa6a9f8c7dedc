"""docs/findings.md tells what the shipped records say."""

import re

import pytest

from repro import paths
from repro.claims import registry
from repro.experiments import stored
from repro.plan import config
from repro.report import findings

SHIPPED = paths.root() / "results/reference" / config.load()[0].reference / "records"


@pytest.fixture(scope="module")
def rows():
    return registry.evaluate(registry.load(), stored.collect(SHIPPED).records)


def test_every_primary_claim_is_told_with_both_axes(rows):
    page = (paths.root() / "docs/findings.md").read_text()
    for row in rows:
        if row.primary:
            assert re.search(rf"{re.escape(row.id)}: \*{row.agreement}\*, {row.scope}", page), row.id


def sentences(text):
    """Heading and sentence, without what stands behind them."""
    parts = [section.partition("\n") for section in text.split("\n### ")[1:]]
    return [
        (at, each) for at, _, part in parts if not at.startswith("Behind") for each in re.findall("^- .*", part, re.M)
    ]


def test_a_paper_is_told_in_ten_sentences():
    papers = (paths.root() / "docs/findings.md").read_text().split("\n## ")[1:]
    assert len(papers) == 4
    for paper in papers:
        told = [sentence for _, sentence in sentences(paper)]
        assert 3 <= len(told) <= 10, paper.partition("\n")[0]
        assert [each for each in told if re.search(r"[.!?] [A-Z]", re.sub(r"\([^()]*\)", "", each))] == []


def test_a_sentence_stands_under_what_the_verdict_on_its_claim_says():
    told = sentences((paths.root() / "docs/findings.md").read_text())
    assert len(told) > 30
    for heading, sentence in told:
        first = re.search(r"[A-Z]{2}-[\w.-]+(?:, an? ([\w-]+))?: \*([\w ]+)\*", sentence)
        assert heading == (_heading(first[2], first[1]) if first else "Cannot be told here"), sentence


@pytest.mark.parametrize("agreement", registry.WORDS)
def test_every_verdict_has_a_heading(rows, agreement):
    """Also one that no shipped claim has at present; and what no paper claims has one whatever its verdict."""
    changed = [rows[0].model_copy(update={"agreement": agreement, "kind": kind}) for kind in ("claim", "critique")]
    for row in changed:
        heading_of = findings.vocabulary([row])["heading_of"]
        assert heading_of(row.id) == _heading(agreement, row.kind)
    assert heading_of() == "Cannot be told here"


def _heading(agreement, kind=None):
    if kind in ("critique", "variant"):
        return "Asked by us"
    holds = agreement in ("reproduced", "consistent", "further")
    open_ = agreement in ("inconclusive", "skipped", "not run")
    return "Holds here" if holds else "Cannot be told here" if open_ else "Holds in part, or not"


def test_a_claim_that_nobody_judged_is_named(rows):
    said = findings.vocabulary([row for row in rows if row.id != "ZT-1.a"])["said"]
    with pytest.raises(ValueError, match=r"a page of repro docs: found ZT-1\.a; allowed: ZT-1\.d"):
        said("ZT-1.a")
