"""What would have to be true for a claim that deviates or cannot be judged (`config/explanations.yaml`): the ladder of
assumptions from our setting to the paper's number, and the measurement that would decide it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import Field, ValidationError

from repro import experiments, paths
from repro.claims import document, registry
from repro.claims.claim import Claim, Scope
from repro.claims.filters import Filters, accepts, matches
from repro.claims.reading import Reading
from repro.claims.registry import Verdict
from repro.plan import config, jobs
from repro.records import provenance, record
from repro.records.record import Record, Strict
from repro.report import figures

OPEN = ("deviates", "inconclusive", "not run", "skipped")  # words that call for an explanation
NO_COMMAND = "no command of this version makes it"  # of a measurement that would decide, where none does


class Rung(Strict):
    """A step of the ladder: the claim's own reading with these keys in place of its own; one that names an experiment
    stands alone. With a `unit` of its own it is a number beside the ladder, as a `part` one of several that together are
    the claim: neither is judged."""

    says: str
    part: bool = False
    value: dict[str, Any] = Field(default_factory=dict)
    unit: str = ""


class Table(Strict):
    """Rows of the series of a record. `where`: the record; `rows`: which rows of its series; `columns`: those shown."""

    says: str
    experiment: str
    where: Filters = Field(default_factory=dict)
    rows: Filters = Field(default_factory=dict)
    columns: list[str] = Field(min_length=1)


class Decides(Strict):
    """The measurement that would decide the claim. With a `figure` there is a command that makes and draws the points of
    `experiment` that pass `where`; minutes are those of the plan. Without, readers are told `NO_COMMAND`. `judges`: claims that they judge, once run on
    as many occasions as a verdict takes; of others they tell more, and the row stays as it is."""

    says: str
    hardware: str
    figure: str = ""
    experiment: str = ""
    tier: str = ""
    platform: str = "laptop"
    where: Filters = Field(default_factory=dict)
    judges: list[str] = Field(default_factory=list)


class Explanation(Strict):
    """One for the claims that share it."""

    claims: list[str] = Field(min_length=1)
    why: str
    ladder: list[Rung] = Field(default_factory=list)
    tables: list[Table] = Field(default_factory=list)
    decides: Decides


class Document(Strict):
    """`config/explanations.yaml`."""

    explanations: list[Explanation]


@dataclass(frozen=True)
class Told:
    """An explanation with the numbers of some records, as texts. `rungs`: what is assumed, our number, how it agrees.
    `tables`: title, columns and rows. `command`: empty where no tier has the points."""

    verdict: Verdict
    why: str
    rungs: list[tuple[str, str, str]]
    tables: list[tuple[str, list[str], list[list[str]]]]
    decides: Decides | None
    command: str = ""


def load(claims: Sequence[Claim], path: Path | None = None) -> dict[str, Explanation]:
    """Explanations by the id of their claims. ConfigError names file, key, what was found and what is allowed."""
    path = path or paths.root() / "config/explanations.yaml"
    known, found = {claim.id: claim for claim in claims}, dict[str, Explanation]()
    for number, one in enumerate(config.load_yaml(path, Document).explanations):
        where = f"{path}: explanations.{number}"
        for name in one.claims:
            if name not in known or name in found:
                allowed = "one explanation a claim" if name in found else "an id of config/claims.yaml"
                raise config.ConfigError(f"{where}.claims: found {name!r}; allowed: {allowed}")
            found[name] = one
            for rung in one.ladder:
                registry.check_reading(_changed(known[name], rung, where), f"{where}.ladder: {name}")
        for table in one.tables:
            _check(f"{where}.tables.experiment", table.experiment, experiments.names())
        if one.decides.figure:
            _check(f"{where}.decides.figure", one.decides.figure, figures.FIGURES)
            _check(f"{where}.decides.experiment", one.decides.experiment, figures.entry(one.decides.figure).reads)
            fields = experiments.get(one.decides.experiment).parameters.model_fields
            for name in one.decides.where:
                _check(f"{where}.decides.where", name, fields)
            _check(f"{where}.decides.tier", one.decides.tier, get_args(config.Tier))
            _check(f"{where}.decides.platform", one.decides.platform, config.platforms())
        for name in one.decides.judges:
            _check(f"{where}.decides.judges", name, known)
    return found


def _check(where: str, found: str, allowed: Any) -> None:
    if found not in allowed:
        raise config.ConfigError(f"{where}: found {found!r}; allowed: {', '.join(allowed)}")


def _changed(claim: Claim, rung: Rung, where: str) -> Claim:
    """The claim with the reading of a rung."""
    own = claim.value.model_dump(exclude_unset=True) if claim.value and "experiment" not in rung.value else {}
    try:
        value = Reading.model_validate(document.filled(rung.value, own))
    except ValidationError as error:
        raise config.ConfigError(config.explain(error, Reading, f"{where}.ladder: {rung.says}")) from error
    scope = Scope(outside="assumed")  # of other runs than the claim's; its filters need not be theirs
    return claim.model_copy(update={"value": value, "scope": scope} | ({"unit": rung.unit} if rung.unit else {}))


# --- with the numbers of records -----------------------------------------------------------------------------------


def tell(claim: Claim, found: Explanation | None, records: Mapping[Path, Record], verdict: Verdict) -> Told:
    """The explanation of one claim, which has this `verdict`. Numbers are read from `records`; what they do not hold
    says so."""
    if found is None:
        return Told(verdict, verdict.reason, [], [], None)
    rungs = [_rung(claim, rung, records) for rung in found.ladder]
    words = command(found.decides, claim.id if claim.id in found.decides.judges else "")
    return Told(verdict, found.why, rungs, [_table(one, records) for one in found.tables], found.decides, words)


def _rung(claim: Claim, rung: Rung, records: Mapping[Path, Record]) -> tuple[str, str, str]:
    row = registry.evaluate([_changed(claim, rung, "")], records)[0]
    word = "" if (rung.unit or rung.part) and row.value is not None else row.agreement
    evidence = f" {row.evidence}" if row.evidence else ""
    return rung.says, registry.numbers(row)[1] + evidence, word


def _table(table: Table, records: Mapping[Path, Record]) -> tuple[str, list[str], list[list[str]]]:
    """Of the newest record that fits; without rows where there is none, or it has no such columns."""
    fit = {p: run for p, run in records.items() if run.experiment == table.experiment and matches(run, table.where)}
    fit = {path: run for path, run in fit.items() if run.status == "ok" and run.series}
    if not fit:
        return f"{table.says}: no record of {table.experiment}", table.columns, []
    path = max(fit, key=lambda path: fit[path].provenance.start)
    says = table.says + (registry.OLDER if provenance.older({path: fit[path]}) else "")
    series = record.read_series(path)
    if missing := [name for name in (*table.columns, *table.rows) if name not in series]:
        return f"{says}: its record has no {', '.join(missing)}", table.columns, []
    for name, wanted in table.rows.items():
        series = series[[accepts(wanted, value) for value in series[name]]]
    rows = series[table.columns].to_dict("records")
    return says, table.columns, [[_text(row[name]) for name in table.columns] for row in rows]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "–"
    return ("yes" if value else "no") if str(value) in ("True", "False") else registry.number(float(value))


def command(decides: Decides, claim: str = "") -> str:
    """The command that makes and draws the deciding measurement; empty where no tier has its points. Slurm jobs are
    submitted by Snakemake with a profile, with `claim` only those that it reads."""
    if not decides.figure:
        return ""
    if (settings := _settings(decides.platform)).slurm is None:
        return f"repro reproduce {decides.figure} --tier {decides.tier} --platform {decides.platform}"
    changed = {"tier": decides.tier} if decides.tier != settings.tier else {}
    changed |= {"claim": claim} if claim else {}
    words = f"snakemake --profile workflows/profiles/{_profile(decides.platform)}"
    if changed:
        words += " --config " + " ".join(f"{name}={value}" for name, value in changed.items())
    return words if claim else f"{words}{' --' if changed else ''} {decides.figure}"


@cache
def _settings(platform: str) -> config.Platform:
    return config.load(platform=platform)[1]


class _Profile(Strict):
    platform: str


@cache
def _profile(platform: str) -> str:
    """The profile of Snakemake that submits to a platform."""
    files = sorted((paths.root() / "workflows/profiles").glob("*/run.yaml"))
    found = {config.load_yaml(file, _Profile).platform: file.parent.name for file in files}
    _check("config/explanations.yaml: decides.platform", platform, found)
    return found[platform]


def cost(decides: Decides) -> tuple[int, float]:
    """How many points of the plan decide, and the minutes that they run."""
    fit = [
        job
        for job in _plan(decides.tier, decides.platform).jobs
        if job.experiment == decides.experiment
        and all(accepts(wanted, getattr(job.point, name)) for name, wanted in decides.where.items())
    ]
    return len(fit), sum(job.minutes for job in fit)


@cache
def _plan(tier: str, platform: str) -> jobs.Plan:
    return jobs.make(tier, platform)
