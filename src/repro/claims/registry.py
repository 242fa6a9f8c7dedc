"""The registry of claims (`config/claims.yaml`) and its evaluation on run records: one verdict a claim.

`document` reads the file, `sample` takes our value of a claim from the records, `verdict` judges it.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel

from repro import experiments, paths
from repro.claims import document
from repro.claims import sample as selection
from repro.claims.claim import Claim, Kind, Published
from repro.claims.reading import Reading
from repro.claims.sample import Nothing, Sample
from repro.claims.verdict import Agreement, Scope, judge
from repro.plan import config
from repro.records import provenance
from repro.records.record import Evidence, Record

Word = Agreement | Literal["skipped", "not run"]
WORDS: tuple[Word, ...] = (*get_args(Agreement), "skipped", "not run")
OLDER = "†"  # after a number that rests on runs by older code
CLOCK = frozenset(("s", "1/s", "s/token", "tokens/s", "bytes/s", "TFLOP/s"))  # units of what a clock measures


class Verdict(BaseModel, allow_inf_nan=False):
    """A row of the verdict table.

    values, occasions   of each run or pair of runs that counts, and the number of its occasion; `value` is their middle
    interval            where the value lies, at 95 % (a model: its band); None where there are too few runs, or another run gives the same
    agreement, scope    the verdict: how our value agrees with the paper's, and in which setting it was found
    older_code          whether code other than the present one made a run that it rests on
    """

    id: str
    title: str
    kind: Kind
    primary: bool
    paper: str
    claim: str
    paper_value: float | None
    value: float | None = None
    interval: tuple[float, float] | None = None
    values: list[float] = []
    occasions: list[int] = []
    repeats: str = ""
    unit: str
    evidence: Evidence | None = None
    tolerance: float
    agreement: Word
    scope: Scope | None = None
    reason: str
    records: list[str]
    older_code: bool = False


def load(path: Path | None = None) -> list[Claim]:
    """All claims: rows in the order of the file, the claims of a row by their letter.

    ConfigError (a ValueError) names file, claim, key, what was found and what is allowed.
    """
    path = path or paths.root() / "config/claims.yaml"
    claims = document.read(path)
    for claim in claims:
        if claim.value is not None:
            check_reading(claim, f"{path}: {claim.id}")
    return claims


def check_reading(claim: Claim, where: str) -> None:
    """A claim must ask for an experiment, metrics and fields that exist; else it would be *not run* for ever."""
    assert claim.value is not None and claim.scope is not None
    reading = claim.value
    if reading.experiment not in experiments.names():
        allowed = ", ".join(experiments.names())
        raise config.ConfigError(f"{where}: value.experiment: found {reading.experiment!r}; allowed: {allowed}")
    experiment = experiments.get(reading.experiment)
    units = experiment.metrics.units()
    fields, metrics = set(experiment.parameters.model_fields), set(units)
    known = fields | metrics | set(experiment.conditions)
    asked: dict[str, tuple[Iterable[str], set[str]]] = {
        "value.metric": (reading.metrics, metrics),
        "value.per": ([reading.per] if reading.per else [], fields | metrics),
        "value.where, over or sequence": ([name for group in reading.groups for name in group], known),
        "scope.where": (claim.scope.where, known),
    }
    for key, (names, allowed) in asked.items():
        if unknown := sorted(set(names) - allowed):
            found = ", ".join(unknown)
            raise config.ConfigError(f"{where}: {key}: found {found}; allowed: {', '.join(sorted(allowed))}")
    for group in reading.groups:
        values = {k: v for k, v in group.items() if k in fields and not isinstance(v, dict | list)}
        config.point(reading.experiment, values, f"{where}: value")
    if (allowed := _units(reading, units)) and claim.unit not in allowed:
        raise config.ConfigError(f"{where}: unit: found {claim.unit!r}; allowed: {', '.join(sorted(allowed))}")
    clocked = experiment.timed and units[reading.metric] in CLOCK
    if clocked and reading.sampled == "once" and not reading.banded:
        found = f"once, of {reading.metric} in {units[reading.metric]}"
        raise config.ConfigError(
            f"{where}: value.sampled: found {found}; allowed: occasions, for what a clock measures"
        )


def _units(reading: Reading, units: Mapping[str, str]) -> set[str]:
    """Units that the value may have; empty where a factor or a divisor gives it one that only the claim knows.

    A count may have what it counts as its unit: the metric's name.
    """
    unit, compared = units[reading.metric], reading.over is not None or reading.sequence is not None
    if compared or units.get(reading.per or "") == unit:
        unit = "×"
    elif reading.per is not None:
        return set()
    if unit in ("1", "×") and reading.factor == 100:
        return {"%"}
    if reading.factor != 1:
        return set()
    return {"1": {"1", "×", reading.metric}, "×": {"1", "×"}}.get(unit, {unit})


def claim(claim_id: str) -> Claim:
    """The claim of this id; ValueError lists the known ones."""
    known = {one.id: one for one in load()}
    if claim_id not in known:
        raise ValueError(f"no claim {claim_id!r}{experiments.closest(claim_id, known)}; allowed: {', '.join(known)}")
    return known[claim_id]


def published(claim_id: str) -> list[Published]:
    """Published numbers of a claim, or of all sub-claims of a base id, for figures.

    A claim that lists none gives its own value. ValueError lists the known ids.
    """
    claims = load()
    chosen = [claim for claim in claims if claim_id in (claim.id, claim.base)]
    if not chosen:
        known = sorted({claim.id for claim in claims} | {claim.base for claim in claims})
        raise ValueError(f"no claim {claim_id!r}, known: {', '.join(known)}")
    listed = [number for claim in chosen for number in claim.published]
    return listed or [
        Published(label=claim.id, value=claim.paper_value, unit=claim.unit, tag=claim.tag)
        for claim in chosen
        if claim.paper_value is not None
    ]


def evaluate(claims: Sequence[Claim], records: Mapping[Path, Record], problems: Sequence[str] = ()) -> list[Verdict]:
    """A verdict for every claim. `problems`: files that should have been records, for claims that might have read one."""
    return [_evaluate(claim, records, problems) for claim in claims]


def _evaluate(claim: Claim, records: Mapping[Path, Record], problems: Sequence[str]) -> Verdict:
    if claim.value is None or claim.scope is None:
        return _row(claim, "not run", f"no experiment in this version reads this claim; it needs {claim.needs}")
    try:
        found = sample(claim, records)
    except ValueError as error:  # of a record whose series is not what the claim reads
        found = Nothing("not run", str(error))
    damaged = sum(_folder(text) == claim.value.experiment for text in problems)
    remarks = [f"{damaged} {_plural('file', damaged)} among the records not used"] if damaged else []
    if isinstance(found, Nothing):
        return _row(claim, found.agreement, "; ".join([found.reason, *remarks]), found.runs)
    if not math.isfinite(found.value):
        reason = "; ".join(["the runs' values are too large to compare", *remarks])
        return _row(claim, "not run", reason, found.runs)
    agreement, why = "inconclusive", "too few runs"
    if found.complete:
        agreement, why = judge(claim, found.value, *found.interval)
    scope = scope_of(claim, found)
    outside = [] if scope == "paper's setting" else [f"{scope}: {claim.scope.outside}"]
    ours = {
        "value": found.value,
        "interval": found.interval if found.complete and found.interval[0] < found.interval[1] else None,
        "values": found.values,
        "occasions": found.occasions,
        "repeats": found.said,
        "evidence": found.evidence,
        "scope": scope,
    }
    reason = "; ".join([f"{why} ({found.said})", *outside, *found.remarks, *remarks])
    return _row(claim, agreement, reason, found.runs, **ours)


def _folder(problem: str) -> str:
    """The folder of the file that a problem begins with."""
    return Path("".join(problem.partition(".json: ")[:2])).parent.name


def sample(claim: Claim, records: Mapping[Path, Record]) -> Sample | Nothing:
    """What the records say of a claim that has a reading."""
    assert claim.value is not None and claim.scope is not None
    defaults: dict[str, Any] = {}
    if claim.value.experiment in experiments.names():
        defaults = experiments.get(claim.value.experiment).defaults
    ordering = claim.comparison == "ordering"
    told = bool(claim.scope.where)  # without filters a scope does not say which settings are the paper's
    return selection.read(claim.value, records, claim.scope.covers, ordering, defaults, any_in_scope=told)


def scope_of(claim: Claim, found: Sample) -> Scope:
    """The setting of what was found."""
    if found.evidence == "modelled":
        return "modelled"
    assert claim.scope is not None
    return "paper's setting" if all(map(claim.scope.covers, found.runs.values())) else "scaled down"


def _row(claim: Claim, agreement: str, reason: str, runs: Mapping[Path, Record] | None = None, **ours: Any) -> Verdict:
    """`ours`: our value with its interval and evidence, where there is one."""
    fields = claim.model_dump(include={"id", "title", "kind", "primary", "paper_value", "unit", "tolerance"})
    fields["paper"] = claim.paper + (claim.version if claim.version.removeprefix("v").isdigit() else "")
    fields["claim"] = f"{claim.claim} [{claim.where}; {claim.tag}]"
    fields |= {
        "records": [relative(path) for path in sorted(runs or {})],
        "older_code": bool(provenance.older(runs or {})),
    }
    return Verdict(**fields, agreement=agreement, reason=reason, **ours)


def relative(path: Path) -> str:
    """A path in words: relative to the root, where it is below it."""
    full, root = path.resolve(), paths.root().resolve()
    return (full.relative_to(root) if full.is_relative_to(root) else path).as_posix()


def papers(path: Path | None = None) -> dict[str, document.Paper]:
    """The papers of a file, else of `config/claims.yaml`, by the prefix of their claims."""
    return config.load_yaml(path or paths.root() / "config/claims.yaml", document.Document).papers


def tally(rows: Sequence[Verdict]) -> str:
    """`24 claims (none in a paper's setting, 20 scaled down, 4 modelled): 7 reproduced, 12 inconclusive, ...; 3 self-checks
    reproduced; 2 critiques: 1 further, 1 deviates`, with how many have no value, and so no setting."""
    claims = [row for row in rows if row.kind == "claim"]
    settings = Counter(row.scope for row in claims)
    valueless = Counter(row.agreement for row in claims if row.scope is None)
    own, *others = get_args(Scope)
    where = [
        f"{settings[own] or 'none'} in a {own}",
        *(f"{settings[word]} {word}" for word in others if settings[word]),
        *(f"{count} {word}" for word, count in valueless.items()),
    ]
    said = [f"{len(claims)} {_plural('claim', len(claims))} ({', '.join(where)}): {words(claims)}"] if claims else []
    for kind in get_args(Kind)[1:]:
        own = [row for row in rows if row.kind == kind]
        judged = {row.agreement for row in own}
        if own:
            said.append(
                f"{len(own)} {_plural(kind, len(own))}" + (f": {words(own)}" if len(judged) > 1 else f" {judged.pop()}")
            )
    return "; ".join(said)


def words(rows: Iterable[Verdict]) -> str:
    """`7 reproduced, 12 inconclusive`, without words that no row has."""
    counts = Counter(row.agreement for row in rows)
    return ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word.removesuffix('y')}ies" if word.endswith("y") else f"{word}s"


def number(value: float) -> str:
    """Four digits; from 1,000 on, no decimals."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def suffix(unit: str) -> str:
    """A unit as it stands behind its number."""
    return "" if unit == "1" else f" · {unit}" if unit.startswith("10") else f" {unit}"


def numbers(row: Verdict, interval: bool = True) -> tuple[str, str]:
    """The paper's value and ours for a table: `1.71 ×`, `1.40 × [1.31, 1.52]`, and `OLDER` where that rests on runs by
    older code. `interval`: with it, where there is one."""
    unit = suffix(row.unit)
    paper, ours = ("–" if value is None else number(value) + unit for value in (row.paper_value, row.value))
    if interval and row.interval is not None:
        ours += " [{}, {}]".format(*map(number, row.interval))
    return paper, ours + (OLDER if row.older_code and row.value is not None else "")


def whose(row: Verdict) -> str:
    """Whose value stands beside ours: the paper's; for self-checks and validations one that we expect, printed or not."""
    return "paper" if row.kind in ("claim", "critique", "variant") else "expected"


def older_code(shown: Iterable[str]) -> str:
    """What `OLDER` means, a line to stand below texts of `numbers`; empty where none of them has it."""
    if not any(OLDER in text for text in shown):
        return ""
    return f"{OLDER} rests on runs by older code than this; run again, they may give another number"
