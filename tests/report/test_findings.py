"""docs/findings.md is what the shipped records say."""

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


def test_the_page_is_that_of_the_shipped_records(rows):
    page = (paths.root() / "docs/findings.md").read_text()
    assert page == findings.text(rows), "run `repro findings`"


def test_every_primary_claim_is_told_with_both_axes(rows):
    page = findings.text(rows)
    for row in rows:
        if row.primary:
            assert re.search(rf"{re.escape(row.id)}: \*{row.agreement}\*, {row.scope}", page), row.id


def test_a_claim_that_nobody_judged_is_named(rows):
    with pytest.raises(ValueError, match=r"findings\.md\.j2: found ZT-1\.a; allowed: ZT-1\.b"):
        findings.text([row for row in rows if row.id != "ZT-1.a"])
