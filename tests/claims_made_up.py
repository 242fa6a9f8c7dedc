"""A made-up claim, and records that answer it."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from repro.claims.claim import Claim
from repro.records.record import Metric, Provenance, Record

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def ok(experiment="timing", repeat=0, evidence="measured", metrics=None, conditions=None, hour=0, **point) -> Record:
    start = WHEN + timedelta(hours=hour)
    return Record(
        experiment=experiment,
        point=point,
        repeat=repeat,
        seed=point.get("seed", 0),
        evidence=evidence,
        status="ok",
        metrics={name: Metric(value=value, unit="1") for name, value in (metrics or {}).items()},
        conditions=conditions or {},
        provenance=Provenance(start=start, end=start),
    )


def bad(status="failed", cause="oom", detail="", repeat=0, **point) -> Record:
    fields = {"experiment": "timing", "point": point, "repeat": repeat, "seed": 0, "status": status, "cause": cause}
    return Record(**fields, detail=detail, provenance=Provenance(start=WHEN, end=WHEN))


def named(*records: Record) -> dict[Path, Record]:
    return {Path(f"records/timing/{number:03}.json"): record for number, record in enumerate(records)}


def claim(**changes) -> Claim:
    """A relative claim, new is twice as fast as old ± 10 %, that measured runs on at least 4 ranks can reproduce."""
    value = {"experiment": "timing", "metric": "seconds", "where": {"plan": "old"}, "over": {"plan": "new"}}
    fields = {
        "id": "ZT-1.a", "title": "speedup", "paper": "2501.04266", "version": "v2", "where": "abstract", "claim": "twice as fast",
        "paper_value": 2.0, "unit": "×", "tag": "R", "direction": "equal", "comparison": "relative", "tolerance": 0.1,
        "tolerance_reason": "test", "no_effect": 1.0, "hardware": "any", "value": value,
        "scope": {"evidence": ["measured"], "where": {"ranks": {"min": 4}}, "outside": "too small"},
    }  # fmt: skip
    return Claim.model_validate(fields | changes)


def pair(new: float, old: float = 2.0, ranks: int = 4, **about) -> list[Record]:
    return [
        ok(plan=plan, ranks=ranks, metrics={"seconds": seconds}, **about)
        for plan, seconds in (("old", old), ("new", new))
    ]


def made(runs: Iterable[Record], **facts) -> list[Record]:
    """The same with other `facts` of where and by what they were made."""
    return [run.model_copy(update={"provenance": run.provenance.model_copy(update=facts)}) for run in runs]


TIMED = claim().value.model_dump() | {"sampled": "occasions"}


def occasions(ratios: list[list[float]], **about) -> list[Record]:
    """Pairs with these ratios: a list for each occasion."""
    flat = [(hour, ratio) for hour, each in enumerate(ratios) for ratio in each]
    return [
        run for repeat, (hour, ratio) in enumerate(flat) for run in pair(1.0, ratio, repeat=repeat, hour=hour, **about)
    ]
