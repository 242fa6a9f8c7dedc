"""`config/`: which points of which experiment make up a tier, where a platform runs them.

Everything is checked before any job starts. An error names the file, the key, what was found and what is allowed.
"""

import itertools
import math
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from repro import experiments, paths
from repro.experiments.base import Point
from repro.plan.documents import ConfigError, explain, load_yaml, shown

Tier = Literal["smoke", "laptop", "gpu", "full", "cluster"]
# A tier that also runs the points of others.
INCLUDES: dict[str, tuple[Tier, ...]] = {"full": ("laptop",)}

# Names that become folders and parts of commands, of regular expressions and of the comments of jobs.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_NAME_IN_WORDS = "letters, digits, dashes and dots, the first a letter or digit"
_NO_PLATFORMS = ("reference", "replot", "plans", "rendered")  # folders of results/ that are something else
_POINTS = 20_000  # of all tiers together, each repeat counted
# Options of sbatch that Snakemake's plugin for Slurm says itself, most of them from keys of ours; it takes no others.
_OF_SNAKEMAKE = re.compile(
    "--(account|array|chdir|clusters|comment|constraint|cpus-per-(gpu|task)|error|export|gpus|gres|job-name"
    "|mem(-per-cpu)?|nodes|ntasks(-per-gpu)?|output|parsable|partition|qos|time|workdir|wrap)(=.*)?"
)

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Minutes = Annotated[float, Field(gt=0, le=1_000_000)]


def _word(value: str) -> str:
    if not value.isprintable() or " " in value or value.startswith("-") or not value:
        raise ValueError("should be one word that does not begin with a dash")
    return value


def _argument(value: str) -> str:
    if not re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", value) or not value.isprintable():
        raise ValueError("should be one argument, --name or --name=value")
    return value


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"should be {_NAME_IN_WORDS}")
    return value


Name = Annotated[str, AfterValidator(_name)]
Word = Annotated[str, AfterValidator(_word)]
Argument = Annotated[str, AfterValidator(_argument)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Grid(_Strict):
    """A cartesian product of parameter values. `minutes`: guess for one run of a point, until it was measured."""

    grid: dict[str, Any] = Field(default_factory=dict)
    repeats: Count = 1
    minutes: Minutes = 0.2

    @property
    def size(self) -> int:
        """How many points these are, each repeat counted."""
        return self.repeats * math.prod(len(values) for values in self.grid.values() if isinstance(values, list))


class ExperimentConfig(_Strict):
    """`tiers`: the grids of each tier; a tier that is left out does not run this experiment."""

    tiers: dict[Tier, list[Grid]]

    def grids(self, tier: str) -> list[Grid]:
        """All grids that a tier runs: those of the tiers it includes come first."""
        return [grid for name in (*INCLUDES.get(tier, ()), tier) for grid in self.tiers.get(name, [])]


class Config(_Strict):
    """`config/config.yaml`."""

    platform: str = "laptop"
    tier: Tier | None = None
    reference: Name
    experiments: dict[str, ExperimentConfig]

    @property
    def shipped(self) -> str:
        """Folder of the shipped results, relative to the root."""
        return f"results/reference/{self.reference}"


class Node(_Strict):
    """What a node has: `packages`, and `gcds` ranks in each. `emulated`: all nodes are in truth one machine."""

    packages: int = Field(ge=1, le=1024)
    gcds: int = Field(ge=1, le=1024)
    emulated: bool = False

    @property
    def ranks(self) -> int:
        return self.packages * self.gcds


class Bin(_Strict):
    """A row of the queue's rules: jobs of at most `nodes` nodes may take `hours`."""

    nodes: Count
    hours: float = Field(gt=0, le=10_000)


class Packing(_Strict):
    """Points are put together into allocations of about `pack_minutes`; each point takes `start_minutes` to begin."""

    pack_minutes: Minutes = 4
    start_minutes: float = Field(0.005, ge=0, le=10_000)


class Slurm(Packing):
    """How jobs are submitted and what the queue allows. `options` go to sbatch, `step_options` to every srun and
    `rank_options` to one whose ranks fill its nodes: each is one argument, whatever stands in it. `needs`: what must be
    set before anything is submitted."""

    environment: str  # shell file that jobs source
    account: Word | None = None
    partition: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    needs: list[Literal["account", "partition", "qos", "constraint"]] = ["account", "partition"]
    cores_per_rank: int = Field(ge=1, le=10_000)
    memory_mb: int = Field(0, ge=0, le=10**9)  # of a node; 0: do not ask
    gres: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+(:[A-Za-z0-9_.]+)?:[0-9]+$")] | None = None
    options: list[Argument] = []
    step_options: list[Argument] = []
    rank_options: list[Argument] = []
    part_options: list[Argument] = []  # the same where a point takes some GPUs of a node: `{gpus}` is their numbers
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] = []  # their numbers in the order of the cores; else 0, 1, ...
    bins: list[Bin] = Field(min_length=1)
    running_jobs: Count  # that the queue runs at once for one user
    queued_jobs: Count = 100  # that it takes at once from one user
    pack_minutes: Minutes = 60
    start_minutes: float = Field(0.3, ge=0, le=10_000)
    begin_minutes: float = Field(0, ge=0, le=10_000)
    readers: Literal["driver", "job"] = "driver"  # where notebooks, verdicts and the report are made

    @field_validator("account")
    @classmethod
    def _one_account(cls, value: str | None) -> str | None:
        if "," in (value or ""):
            raise ValueError("should be one account: a job has one")
        return value

    @field_validator("options")
    @classmethod
    def _not_of_snakemake(cls, options: list[str]) -> list[str]:
        if taken := ", ".join(filter(_OF_SNAKEMAKE.fullmatch, options)):
            raise ValueError(
                f"should be without {taken}: Snakemake says it itself, most of it from keys beside this one"
            )
        return options

    @field_validator("part_options")
    @classmethod
    def _known_braces(cls, options: list[str]) -> list[str]:
        if odd := {name for option in options for name in re.findall(r"{\w*}", option)} - {"{gpus}"}:
            raise ValueError(f"should have no {', '.join(sorted(odd))}: only {{gpus}} stands for something")
        return options

    def require_gpus(self, per_node: int) -> None:
        """ValueError where options say another number of GPUs than `node`: ranks would share some, or lack some."""
        if self.gpus and sorted(self.gpus) != list(range(per_node)):
            raise ValueError(f"slurm.gpus: found {self.gpus}, allowed: each of 0 to {per_node - 1} once, as node says")
        for name in ("options", "step_options", "rank_options", "part_options"):
            for option in getattr(self, name):
                key, _, number = option.partition("=")
                if key == "--gpus-per-node" and number.rpartition(":")[2] != str(per_node):  # a100:4 names a kind
                    raise ValueError(f"slurm.{name}: found {option}, allowed: --gpus-per-node={per_node}, as node says")

    @property
    def submission(self) -> dict[str, str | int]:
        """What Snakemake's plugin for Slurm is told of every job, by its names. It quotes each value for the shell in
        which it calls sbatch, but takes `slurm_extra` as text of that shell."""
        chosen = {
            "slurm_account": self.account,
            "slurm_partition": self.partition,
            "qos": self.qos,
            "constraint": self.constraint,
            "gres": self.gres,
            "slurm_extra": shlex.join(self.options),
        }
        return {key: value for key, value in chosen.items() if value} | {"mem_mb": self.memory_mb}

    @property
    def beginning(self) -> str:
        """Shell commands that begin every job. Without a slash in it, bash would look for the file on PATH."""
        return f"set +u; source {shlex.quote(os.path.join('.', self.environment))}; set -u;"

    def limit_hours(self, nodes: int) -> float | None:
        """What a job of so many nodes may take; None where no job may have them."""
        return next((row.hours for row in sorted(self.bins, key=lambda row: row.nodes) if nodes <= row.nodes), None)


class Platform(_Strict):
    """`config/platforms/NAME.yaml`: where the jobs run.

    tier          what runs there unless another is asked for
    memory_gb     of a rank, for the plan to say which points fit
    hardware      nearest machine of `repro.scaling`, for the plan to predict minutes
    node, slurm   of a cluster
    """

    description: str
    tier: Tier
    memory_gb: float | None = Field(None, gt=0, le=1_000_000)
    hardware: str | None = None
    node: Node | None = None
    slurm: Slurm | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Platform":
        if self.slurm is None:
            return self
        if self.node is None:
            raise ValueError("node: found none; allowed with slurm: packages and gcds of a node")
        if self.node.ranks == 1:
            raise ValueError("node: found 1 rank; allowed: two or more, as Snakemake's plugin submits no job of one")
        self.slurm.require_gpus(self.node.ranks)
        return self


def point(experiment: str, values: dict[str, Any], where: str) -> Point:
    """Parameters of `experiment` from `values`; ConfigError lists known keys and allowed values at `where`, ValueError the
    experiments where it is none."""
    parameters = experiments.get(experiment).parameters
    try:
        return parameters.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, parameters, where)) from error


def points(experiment: str, grid: Grid, where: str) -> list[Point]:
    """All points of a grid: the product of its lists, scalars kept as they are. ConfigError for an empty list or a bad
    point."""
    if empty := [key for key, values in grid.grid.items() if values == []]:
        raise ConfigError(
            f"{where}: {', '.join(empty)}: found an empty list, which makes no point; allowed: at least one value"
        )
    axes = [values if isinstance(values, list) else [values] for values in grid.grid.values()]
    return [point(experiment, dict(zip(grid.grid, c, strict=True)), where) for c in itertools.product(*axes)]


def platforms() -> list[str]:
    """Names of the platform files, without those whose `results/NAME` or `results/NAME-TIER` is not theirs alone."""
    names = {path.stem for path in (paths.root() / "config/platforms").glob("*.yaml")}
    taken = {*_NO_PLATFORMS, *(f"{name}-{tier}".lower() for name in names for tier in get_args(Tier))}
    return sorted(name for name in names if _NAME.fullmatch(name) and name.lower() not in taken)


def load(tier: str | None = None, platform: str | None = None) -> tuple[Config, Platform]:
    """The checked configuration with `tier` and `platform` from the arguments, the file, or the platform's default.

    Raises ConfigError for anything wrong in config.yaml, every grid of every tier included, or in the platform's file.
    """
    path = paths.root() / "config/config.yaml"
    config = load_yaml(path, Config)
    where = f"{path}: platform" if platform is None else "--platform"
    config.platform = config.platform if platform is None else platform
    if config.platform not in platforms():
        raise ConfigError(
            f"{where}: found {shown(config.platform)}; allowed: {', '.join(platforms())}. The name of a file of"
            f" config/platforms is {_NAME_IN_WORDS}, is not that of another with a tier behind it, and not"
            f" {' or '.join(_NO_PLATFORMS)}"
        )
    file = paths.root() / f"config/platforms/{config.platform}.yaml"
    settings = load_yaml(file, Platform)
    if settings.slurm is not None and not (paths.root() / settings.slurm.environment).is_file():
        found = shown(settings.slurm.environment)
        raise ConfigError(
            f"{file}: slurm.environment: found {found}; allowed: a shell file, relative to {paths.root()}"
        )
    if tier is not None and tier not in get_args(Tier):
        raise ConfigError(f"--tier: found {tier!r}; allowed: {', '.join(get_args(Tier))}")
    config.tier = tier or config.tier or settings.tier
    check_references(config, path)
    return config, settings


def results_folder(config: Config, platform: Platform) -> str:
    """Where runs of this tier on this platform go, relative to the root."""
    return f"results/{config.platform}" + ("" if config.tier == platform.tier else f"-{config.tier}")


def check_references(config: Config, path: Path) -> None:
    """ConfigError unless experiments, points and shipped records exist, the points are not too many, and the minutes of
    each are below the limit of a run."""
    known, count = experiments.names(), 0
    for name, experiment in config.experiments.items():
        if name not in known:
            raise ConfigError(f"{path}: experiments.{name}: no such experiment; allowed: {', '.join(known)}")
        for tier, grids in experiment.tiers.items():
            for number, grid in enumerate(grids):
                where = f"{path}: experiments.{name}.tiers.{tier}.{number}"
                count += grid.size
                if count > _POINTS:
                    raise ConfigError(f"{where}.grid: found {count:,} points with those before; allowed: {_POINTS:,}")
                points(name, grid, f"{where}.grid")
                limit = experiments.get(name).timeout_s / 60
                if grid.minutes >= limit:
                    raise ConfigError(
                        f"{where}.minutes: found {grid.minutes:g}; allowed: less than {limit:g}, a run's limit"
                    )
    shipped = [folder.name for folder in sorted((paths.root() / "results/reference").glob("*")) if folder.is_dir()]
    if shipped and config.reference not in shipped:
        raise ConfigError(f"{path}: reference: found {config.reference!r}; allowed: {', '.join(shipped)}")
