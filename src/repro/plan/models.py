"""A plan as data: what `repro plan --json` prints, Snakemake reads, and an allocation finds again."""

from typing import Any, Literal

from pydantic import AwareDatetime, BaseModel, SerializeAsAny, ValidationInfo, field_validator

from repro import experiments
from repro.experiments.base import Point
from repro.plan import config
from repro.plan.packing import Allocation

State = Literal["done", "stale", "failed", "skipped", "to run"]


class Job(BaseModel):
    """One repeat of one point.

    occasion                on which it runs: the first, or the one that was asked for
    attempt                 number of its next run, or of its last one when it is done or skipped
    nodes, tasks_per_node   what a job starts for it
    packages                those of a node that it uses
    """

    experiment: str
    point: SerializeAsAny[Point]
    repeat: int
    occasion: int = 1
    record: str  # relative to the root
    state: State
    attempt: int
    minutes: float
    ranks: int
    nodes: int = 1
    packages: int = 1
    tasks_per_node: int = 1
    rank_gb: float | None = None  # predicted memory of a rank, where the platform says what it has

    @field_validator("point", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> Any:
        """A point that is read from a plan file is one of its experiment again."""
        return experiments.get(info.data.get("experiment", "")).parameters.model_validate(value)


class FigurePlan(BaseModel):
    """What one figure costs: the jobs it shows and the minutes they take, how many of them are still to run, and the
    minutes of those. `queue` tells more where they are Slurm jobs."""

    notebook: str
    experiments: list[str]
    jobs: int
    minutes: float
    to_run: int
    minutes_left: float
    queue: "QueueCost | None" = None


class QueueCost(BaseModel):
    """Cost of what is still to run: Slurm jobs, rows of the queue's rules, hours of whole nodes and of their GPUs, and
    hours until all have run, without waiting for nodes."""

    allocations: int
    bins: list[str]
    node_hours: float
    gpu_hours: float
    wall_hours: float


class SlurmPlan(BaseModel):
    """Where allocations are Slurm jobs. `missing`: settings of the platform file without which nothing is submitted;
    `tasks_per_node`: what every job asks for, as nodes are given whole; `submission` and `beginning`: of every job, as
    `config.Slurm` quotes them."""

    settings: config.Slurm
    submission: dict[str, str | int]
    beginning: str
    tasks_per_node: int
    missing: list[str]
    cost: QueueCost


class Plan(BaseModel):
    """All jobs of a tier on a platform.

    results     where they go, relative to the root
    allocations what is still to run, as the platform runs it
    minutes     until all of that has run on this machine's cores, and figures and verdicts are made
    memory_gb   what a rank of the platform has
    unfit       how many points the platform's nodes cannot hold, by reason
    predicted   experiments whose minutes `repro.scaling` predicts where no record knows them
    """

    made: AwareDatetime
    platform: str
    tier: str
    results: str
    reference: str
    shipped: int  # records in `reference`
    outdated: int  # those of older code
    memory_gb: float | None
    jobs: list[Job]
    minutes: float
    figures: dict[str, FigurePlan]
    experiments: dict[str, bool]  # and whether their points are timed
    allocations: list[Allocation]
    unfit: dict[str, int] = {}
    predicted: list[str] = []
    slurm: SlurmPlan | None = None
