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


def test_a_claim_that_nobody_judged_is_named(rows):
    said = findings.vocabulary([row for row in rows if row.id != "ZT-1.a"], "page.md.j2")["said"]
    with pytest.raises(ValueError, match=r"page\.md\.j2: found ZT-1\.a; allowed: ZT-1\.d"):
        said("ZT-1.a")
