"""The one table: claim, figure, command, minutes measured here, what it needs, what to expect, the shipped verdict."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro import experiments
from repro.claims import compare, registry
from repro.claims.claim import Claim
from repro.claims.filters import accepts
from repro.claims.reading import Reading
from repro.claims.registry import Verdict
from repro.experiments.base import Point
from repro.plan import config
from repro.records import statistics
from repro.records.record import Record
from repro.report import explanations, figures

_TIERS = ("laptop", "full", "gpu", "cluster", "smoke")  # the first that holds all points of a claim is named
_LOCAL = ("laptop", "full", "smoke")  # run on any machine
LATER = "not run yet"
_EVERY_CLAIM = "claims_overview"  # is no figure of any claim in particular


@dataclass(frozen=True)
class Row:
    """A claim as the pages show it.

    figure      that shows the claim; empty where none does
    command     makes the figure, and the records of the experiments that it reads; empty where no tier has the points
    occasions   how often, over an hour apart
    seconds     that each of these records took, by path relative to the root
    needs       of a machine, in words
    stated      the paper's value and the tolerance of the verdict
    here        our value by the given records, with its interval
    expected    where the value of one more run lies
    verdict     by the given records
    explained   why it is so, where `config/explanations.yaml` says it
    """

    claim: Claim
    figure: str
    command: str
    occasions: int
    seconds: Mapping[str, float]
    needs: str
    stated: str
    here: str
    expected: str
    verdict: Verdict
    explained: explanations.Explanation | None

    @property
    def paper(self) -> str:
        """The paper's value alone; of an order, what our ratio must exceed."""
        return printed(self.claim)

    @property
    def own_command(self) -> str:
        """Makes the records that the claim reads, and no others."""
        own = f"repro reproduce {self.claim.id}"
        return re.sub(r"^repro reproduce \S+", own, self.command) if self.verdict.records else self.command

    @property
    def minutes(self) -> str:
        return minutes([self])

    @property
    def judged(self) -> str:
        """Agreement, scope and kind of evidence in words."""
        said = [self.verdict.agreement, self.verdict.scope or "", self.verdict.evidence or ""]
        return ", ".join(dict.fromkeys(filter(None, said)))

    @property
    def waits(self) -> bool:
        """Whether it has no value, though any machine could give one."""
        return self.needs == LATER

    @property
    def notebook(self) -> str:
        """That of its figure, else of the figure that reads its experiment."""
        return figures.entry(_figure(self.claim)).notebook if self.claim.value else ""


def minutes(rows: Sequence[Row]) -> str:
    """Of all records that these claims read, each counted once."""
    seconds = {name: taken for row in rows for name, taken in row.seconds.items()}
    if not seconds:
        return "–"
    found = sum(seconds.values()) / 60
    return f"{found:.1f}" if found >= 0.05 else "< 0.1"


def rows(claims: Sequence[Claim], records: Mapping[Path, Record], problems: Sequence[str] = ()) -> list[Row]:
    """A row for every claim, in their order, judged by these records."""
    runs = {registry.relative(path): run for path, run in records.items()}
    settings, _ = config.load()
    explained, tiers = explanations.load(claims), _points(settings)
    found = []
    for claim, verdict in zip(claims, registry.evaluate(claims, records, problems), strict=True):
        mine = {name: runs[name] for name in verdict.records}
        command, occasions, needs = _command(claim, mine, explained.get(claim.id), tiers, settings.tier)
        seconds = {n: (run.provenance.end - run.provenance.start).total_seconds() for n, run in mine.items()}
        _, here = registry.numbers(verdict)
        found.append(
            Row(
                claim=claim,
                figure=next((name for name, entry in figures.FIGURES.items() if claim.id in entry.claims), ""),
                command=command,
                occasions=occasions,
                seconds=seconds,
                needs=needs,
                stated=stated(claim),
                here=here,
                expected=_expected(claim, verdict),
                verdict=verdict,
                explained=explained.get(claim.id),
            )
        )
    return found


def _points(settings: config.Config) -> dict[str, dict[Point, int]]:
    """By tier its points, and how often each is run on an occasion."""
    found: dict[str, dict[Point, int]] = {}
    for tier in _TIERS:
        repeats = found.setdefault(tier, {})
        for name, experiment in settings.experiments.items():
            for grid in experiment.grids(tier):
                for point in config.points(name, grid, f"config/config.yaml: experiments.{name}"):
                    repeats[point] = max(grid.repeats, repeats.get(point, 0))
    return found


def _command(
    claim: Claim,
    runs: Mapping[str, Record],
    explained: explanations.Explanation | None,
    tiers: Mapping[str, Mapping[Point, int]],
    usual: str,
) -> tuple[str, int, str]:
    """What makes the records of a claim, on how many occasions, and on what. Of a claim without records: what would
    make them, if it is known. `usual`: the tier that a command need not name."""
    if claim.value is None:
        return "", 1, claim.needs
    clocked, repeats = claim.value.sampled == "occasions", claim.value.together
    tier = next((t for t in _TIERS if _answers(claim.value, runs, tiers[t], repeats)), None)
    if runs:
        needs = _needs(claim, runs)
    elif explained is not None and tier not in _LOCAL:
        times = statistics.OCCASIONS if clocked else 1
        return explanations.command(explained.decides, claim.id), times, explained.decides.hardware
    else:
        needs = LATER if tier in _LOCAL else claim.needs or "–"
    if tier is None:
        return "", 1, needs
    command = f"repro reproduce {_figure(claim)}" + ("" if tier == usual else f" --tier {tier}")
    return command, statistics.OCCASIONS if clocked else 1, needs


def _answers(reading: Reading, runs: Mapping[str, Record], points: Mapping[Point, int], repeats: int) -> bool:
    """Whether points of a tier are those of the runs; where there are none, whether they could answer the claim."""
    of = experiments.get(reading.experiment).parameters
    if runs:
        return all(points.get(of.model_validate(run.point), 0) >= repeats for run in runs.values())
    mine = [point for point, often in points.items() if isinstance(point, of) and often >= repeats]
    asked, usual = {name for group in reading.groups for name in group}, of()

    def fits(point: Point, filters: Mapping[str, Any]) -> bool:
        own = {name: filters.get(name, {}) if name in asked else getattr(usual, name) for name in of.model_fields}
        return all(accepts(wanted, getattr(point, name)) for name, wanted in own.items())

    return all(any(fits(point, filters) for point in mine) for filters in reading.groups)


def _figure(claim: Claim) -> str:
    """The figure of a claim, else one that reads the same experiment: its points are those of the claim."""
    assert claim.value is not None
    known = figures.FIGURES.items()
    own = [name for name, entry in known if claim.id in entry.claims]
    same = [name for name, entry in known if claim.value.experiment in entry.reads and name != _EVERY_CLAIM]
    return [*own, *same, _EVERY_CLAIM][0]


_SOFTWARE = {"flover_peers": "make peers"}  # that the environment does not have


def _needs(claim: Claim, runs: Mapping[str, Record]) -> str:
    """`2 cores, root`: the machine that made these records, and whether links have to be shaped for the claim."""
    cores = max(run.provenance.cores for run in runs.values())
    gpus = dict.fromkeys(name for run in runs.values() for name in run.provenance.gpu)
    more = dict.fromkeys(_SOFTWARE[run.experiment] for run in runs.values() if run.experiment in _SOFTWARE)
    return ", ".join([f"{cores} cores", *gpus, *(["root"] if claim.needs_shaped_links else []), *more])


def printed(claim: Claim) -> str:
    """`1.71 ×`; of an order, what our ratio must exceed."""
    if claim.paper_value is None:
        return f"ordering: ratio > {1 + claim.tolerance:.3g}"
    return registry.number(claim.paper_value) + registry.suffix(claim.unit)


def stated(claim: Claim) -> str:
    """`1.71 × ± 15 %`: the paper's value and the tolerance of the verdict, which an order has within it."""
    value = printed(claim)
    if claim.paper_value is None:
        return value
    if claim.comparison == "relative":
        return f"{value} ± {100 * claim.tolerance:.3g} %"
    return f"{value} ± {claim.tolerance:.3g}" + (" points" if claim.unit == "%" else "")


def _expected(claim: Claim, verdict: Verdict) -> str:
    """Where the value of one more occasion or seed lies, 19 times in 20; or that the same points and seeds give the same
    value, with the range of single seeds where there are several."""
    if claim.value is None or verdict.value is None:
        return "–"
    if claim.value.sampled == "sequences" and len(verdict.values) > 1:
        low, high = (f"{end:.3g}" for end in (min(verdict.values), max(verdict.values)))
        return "the same, to 3 digits" + (f"; of single seeds {low} to {high}" if low != high else "")
    if claim.value.sampled not in ("occasions", "seeds"):
        return "the same, to 3 digits"
    ends = compare.expected(claim.value, verdict)
    sampled = "occasion" if claim.value.sampled == "occasions" else "seed"
    if ends is None:
        return f"not known: one {sampled}"
    low, high = (f"{end:.3g}" for end in ends)
    return f"{low} to {high}" if low != high else "the same, to 3 digits"
