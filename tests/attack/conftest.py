"""Counts per surface at the end of `pytest tests/attack`: a surface is a file, a probe a test or a row of its table."""

from collections import Counter

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: dict[str, Counter[str]] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            file, _, _ = report.nodeid.partition("::")
            if "/attack/" in file:
                surface = file.rpartition("/test_")[2].removesuffix(".py").replace("_", " ")
                counts.setdefault(surface, Counter())[outcome] += 1
    if not counts:
        return
    terminalreporter.section("probes per surface")
    rows = [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]
    for surface, found in rows:
        bad = found["failed"] + found["error"]
        terminalreporter.line(f"{surface:16} {found.total():5} probes {bad:5} bad {found['skipped']:5} skipped")
