"""What an experiment is: a point (validated parameters), the number of ranks it needs, and `run(point) -> Outcome`.

An experiment module defines `EXPERIMENT = Experiment(...)`. It imports its engine inside `run`, so that listing
experiments stays fast. It knows nothing of records, files or Snakemake.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from repro.records.record import Evidence, Metric


class Point(BaseModel):
    """Parameters of one point. Subclasses add fields with defaults; an unknown key is an error that lists the known ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    seed: int = Field(0, ge=0)


class Shape(NamedTuple):
    """Ranks of a point: on so many nodes, of so many packages each, with so many ranks in a package."""

    nodes: int = 1
    packages: int = 1
    gcds: int = 1

    @property
    def in_node(self) -> int:
        return self.packages * self.gcds

    @property
    def ranks(self) -> int:
        return self.nodes * self.in_node


class MissingHardware(RuntimeError):
    """This machine lacks what the point needs. Recorded as *skipped* with the message as the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a point yields. `conditions`: what the numbers depend on beyond the point (e.g. `{"fabric": "shaped"}`)."""

    metrics: dict[str, Metric]
    evidence: Evidence = "measured"
    conditions: dict[str, str] = field(default_factory=dict)
    series: pd.DataFrame | None = None
    topology: str = ""


def one_process(point: Any) -> Shape:
    """Of an experiment that says nothing of ranks: one process, which may start others on its machine."""
    return Shape()


@dataclass(frozen=True)
class Experiment:
    """`label` gives a short file name part such as `zeropp-2x2x2`; `reports`: every metric and condition that a record can hold,
    so that a claim which asks for another is found at once; `shape` tells where the processes of a point sit; `one_machine`: they
    need memory that all of them see; `memory` predicts bytes per rank by kind (None: unknown); `timeout_s` bounds one run;
    `timed`: its claims are about time, so nothing else may run on the machine meanwhile; `predicts`: by experiment, a function of one of
    its points and of the name of a platform's hardware, which tells the seconds of a run there (None: cannot)."""

    summary: str
    parameters: type[Point]
    run: Callable[[Any], Outcome]
    label: Callable[[Any], str]
    reports: frozenset[str]
    shape: Callable[[Any], Shape] = one_process
    one_machine: Callable[[Any], bool] = lambda point: False
    memory: Callable[[Any], dict[str, float] | None] = lambda point: None
    timeout_s: float = 600.0
    timed: bool = True
    predicts: Mapping[str, Callable[[Any, str], float | None]] = field(default_factory=dict)

    @property
    def ranked(self) -> bool:
        """Whether a point's processes are ranks that `repro.launch` joins, a single one too."""
        return self.shape is not one_process

    def check(self, outcome: Outcome) -> Outcome:
        """The outcome; AssertionError when it holds a name that `reports` lacks."""
        unknown = (outcome.metrics.keys() | outcome.conditions.keys()) - self.reports
        assert not unknown, f"not in the experiment's `reports`: {', '.join(sorted(unknown))}"
        return outcome
