"""How well steps of the ZeRO plans are predicted on an emulated network: for docs/scaling.md."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from repro.experiments import stored
from repro.records import provenance, record

WITHIN = 0.15  # of an error, as a share
SLOW = 25.0  # Mbit/s between nodes: what the claims are measured at, and less


@dataclass(frozen=True)
class Row:
    """The steps of a run that were predicted and not used to calibrate, all plans at all rates.

    rates    Mbit/s between nodes
    made     day and processor; `older`: by code other than the present one
    errors   predicted ÷ measured - 1, of each step; `at` its rate
    worst    the plan and rate of the largest error
    over     measured time of the plan that is predicted to be fastest ÷ that of the fastest, at the worst rate
    """

    rates: str
    micro_batches: int
    made: str
    older: bool
    errors: np.ndarray
    at: np.ndarray
    worst: str
    over: float

    @property
    def within(self) -> int:
        """How many are off by `WITHIN` at most."""
        return int(self._near.sum())

    @property
    def slow(self) -> int:
        """How many are at rates of `SLOW` and below."""
        return int((self.at <= SLOW).sum())

    @property
    def slow_within(self) -> int:
        return int(self._near[self.at <= SLOW].sum())

    @property
    def _near(self) -> np.ndarray:
        return np.abs(self.errors) <= WITHIN

    @property
    def median(self) -> float:
        return float(np.median(np.abs(self.errors)))

    @property
    def largest(self) -> float:
        return float(self.errors[np.abs(self.errors).argmax()])


def predicted(records: Path) -> list[Row]:
    """Of all plans, by micro-batches. ValueError for a folder without such a run."""
    runs = stored.collect(records / "scaling_step").records
    all_plans = [(path, run) for path, run in runs.items() if run.status == "ok" and run.point["plans"] == "all"]
    if not all_plans:
        raise ValueError(f"docs/scaling.md shows scaling_step of all plans: found no such run in {records}")
    return [_row(path, run) for path, run in sorted(all_plans, key=lambda each: each[1].point["accumulation"])]


def _row(path: Path, run: record.Record) -> Row:
    steps = record.read_series(path)
    steps = steps[~steps.calibrated.astype(bool)]
    errors = np.expm1(steps.log_error.to_numpy())
    worst = steps.iloc[int(np.abs(errors).argmax())]
    return Row(
        rates=run.point["rates"].replace(",", ", "),
        micro_batches=run.point["accumulation"],
        made=f"{run.provenance.start:%Y-%m-%d}, {run.provenance.processor}",
        older=bool(provenance.older({path: run})),
        errors=errors,
        at=steps.cluster_mbit_s.to_numpy(),
        worst=f"`{worst.plan}` at {worst.cluster_mbit_s:g}",
        over=run.metrics["first_plan_over_fastest"].value,
    )
