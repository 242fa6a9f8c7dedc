"""Filters on run records: `{plan: zeropp, nodes: {min: 48}, fabric: {not: "unshaped*"}}` in `config/claims.yaml`."""

import fnmatch
import math
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from repro.records.record import Record

_HELP = "a value, a list of values, {} (anything), {min: n, max: n} or {not: pattern}"


def _check(filters: dict[str, Any]) -> dict[str, Any]:
    def fine(wanted: Any) -> bool:
        if isinstance(wanted, dict):
            bounds = set(wanted) <= {"min", "max"} and all(isinstance(n, int | float) for n in wanted.values())
            return bounds or (set(wanted) == {"not"} and isinstance(wanted["not"], str))
        return isinstance(wanted, int | float | str)

    for name, wanted in filters.items():
        if not (fine(wanted) or (isinstance(wanted, list) and wanted and all(map(fine, wanted)))):
            raise ValueError(f"filter {name!r} is {wanted!r}, must be {_HELP}")
    return filters


Filters = Annotated[dict[str, Any], AfterValidator(_check)]


def accepts(wanted: Any, found: Any) -> bool:
    """Whether one fact passes one filter. Floats match to 6 digits; a pattern is a shell pattern."""
    if isinstance(wanted, list):
        return any(accepts(one, found) for one in wanted)
    if isinstance(wanted, dict):
        if "not" in wanted:
            return not fnmatch.fnmatchcase(str(found), str(wanted["not"]))
        if wanted and not isinstance(found, int | float):
            return False
        return all(found >= end if name == "min" else found <= end for name, end in wanted.items())
    if isinstance(wanted, float) and isinstance(found, int | float):
        return math.isclose(wanted, found, rel_tol=1e-6)
    return bool(wanted == found)


def matches(run: Record, filters: Mapping[str, Any]) -> bool:
    """Whether a run passes all filters. A run that failed or was skipped also passes filters on facts that it does not have."""
    known, untold = run.facts, run.status != "ok"
    return all(accepts(wanted, known[name]) if name in known else untold for name, wanted in filters.items())


def words(filters: Mapping[str, Any]) -> str:
    """Filters as a reader would say them: `plan=zeropp, nodes min 48`."""

    def word(name: str, wanted: Any) -> str:
        if isinstance(wanted, dict):
            return ", ".join(f"{name} {kind} {end}" for kind, end in wanted.items()) or f"any {name}"
        return f"{name}={' or '.join(map(str, wanted)) if isinstance(wanted, list) else wanted}"

    return ", ".join(word(*item) for item in filters.items()) or "any point"
