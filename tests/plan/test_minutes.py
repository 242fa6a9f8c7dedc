"""What README and Makefile promise before anything is installed."""

import re

from repro import paths
from repro.claims import registry
from repro.plan import config
from repro.records import record

MAKEFILE = (paths.root() / "Makefile").read_text()


def test_readme_and_makefile_promise_the_same_minutes():
    laptop, smoke = re.search(r"points: (\d+) minutes on 2 cores, (\d+) for make smoke", MAKEFILE).groups()
    text = (paths.root() / "README.md").read_text()
    assert f"then {laptop} minutes of runs on 2 cores" in text and f"every experiment: {smoke} minutes" in text


def test_the_claims_that_need_root_are_counted():
    known = registry.load()
    found = record.collect(paths.root() / "results/reference" / config.load()[0].reference / "records")
    emulated = sum(row.evidence == "emulated" for row in registry.evaluate(known, found.records))
    assert f"{emulated} of {len(known)} claims *not run*" in MAKEFILE
