"""`config/`: which points of which experiment make up a tier, where a platform runs them.

Everything is checked before any job starts. An error names the file, the key, what was found and what is allowed.
"""

import itertools
import types
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from repro import experiments, paths
from repro.experiments.base import Point

Model = TypeVar("Model", bound=BaseModel)
Tier = Literal["smoke", "laptop", "gpu", "full", "cluster"]
# A tier that also runs the points of others.
INCLUDES: dict[str, tuple[Tier, ...]] = {"full": ("laptop",)}


class ConfigError(ValueError):
    """A configuration file that cannot be used; the message names file, key, what was found and what is allowed."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Grid(_Strict):
    """A cartesian product of parameter values. `minutes`: guess for one run of a point, until it was measured."""

    grid: dict[str, Any] = Field(default_factory=dict)
    repeats: int = Field(1, ge=1)
    minutes: float = Field(0.2, gt=0)


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
    reference: str
    experiments: dict[str, ExperimentConfig]


class Node(_Strict):
    """What a node has: `packages`, and `gcds` ranks in each. `emulated`: all nodes are in truth one machine."""

    packages: int = Field(ge=1)
    gcds: int = Field(ge=1)
    emulated: bool = False

    @property
    def ranks(self) -> int:
        return self.packages * self.gcds


class Bin(_Strict):
    """A row of the queue's rules: jobs of at most `nodes` nodes may take `hours`."""

    nodes: int = Field(ge=1)
    hours: float = Field(gt=0)


class Packing(_Strict):
    """Points are put together into allocations of about `pack_minutes`; each point takes `start_minutes` to begin."""

    pack_minutes: float = Field(2, gt=0)
    start_minutes: float = Field(0.005, ge=0)


class Slurm(Packing):
    """How jobs are submitted and what the queue allows. `options` go to sbatch, `rank_options` to srun. `needs`: what
    must be set before anything is submitted."""

    environment: str  # shell file that jobs source
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    needs: list[Literal["account", "partition", "qos", "constraint"]] = ["account", "partition"]
    cores_per_rank: int = Field(ge=1)
    memory_mb: int = Field(0, ge=0)  # of a node; 0: do not ask
    options: list[str] = []
    rank_options: list[str] = []
    part_options: list[str] = []  # the same where a point takes some GPUs of a node: `{gpus}` stands for their numbers
    bins: list[Bin] = Field(min_length=1)
    running_jobs: int = Field(ge=1)  # that the queue runs at once for one user
    queued_jobs: int = Field(100, ge=1)  # that it takes at once from one user
    pack_minutes: float = Field(60, gt=0)
    start_minutes: float = Field(0.3, ge=0)
    readers: Literal["driver", "job"] = "driver"  # where notebooks, verdicts and the report are made

    def limit_hours(self, nodes: int) -> float | None:
        """What a job of so many nodes may take; None where no job may have them."""
        return next((row.hours for row in sorted(self.bins, key=lambda row: row.nodes) if nodes <= row.nodes), None)


class Platform(_Strict):
    """`config/platforms/NAME.yaml`: where the jobs run.

    tier          what runs there unless another is asked for
    memory_gb     of a rank, for the plan to say which points fit
    hardware      nearest machine of `repro.scaling`, for the plan to predict minutes
    packing       of points that are local processes
    node, slurm   of a cluster
    """

    description: str
    tier: Tier
    memory_gb: float | None = Field(None, gt=0)
    hardware: str | None = None
    packing: Packing = Packing()
    node: Node | None = None
    slurm: Slurm | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Platform":
        if self.slurm is not None and self.node is None:
            raise ValueError("slurm needs node: how many packages and GCDs a node has")
        return self


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _allowed_values(annotation: Any) -> str:
    if _is_model(annotation):
        return f"a mapping with keys {', '.join(annotation.model_fields)}"
    if get_origin(annotation) is Literal:
        return ", ".join(map(repr, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_allowed_values(part) for part in get_args(annotation))
    return getattr(annotation, "__name__", str(annotation))


def _allowed(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Known keys, or allowed values, at the place in `model` that a pydantic error points to."""
    here: Any = model
    for number, step in enumerate(location):
        if location[number + 1 :] == ("[key]",) and get_origin(here) is dict:  # the key of a mapping, not its value
            return f"allowed keys: {_allowed_values(get_args(here)[0])}"
        if get_origin(here) in (Union, types.UnionType):  # an optional section: look inside it
            here = next(filter(_is_model, get_args(here)), here)
        if _is_model(here):
            if step not in here.model_fields:
                return "known keys: " + ", ".join(here.model_fields)
            here = here.model_fields[str(step)].annotation
        elif get_origin(here) in (dict, list):
            here = get_args(here)[-1]
    return f"allowed: {_allowed_values(here)}"


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """A pydantic error in one line each: place, key, what was found, what is allowed."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(map(str, item["loc"])) or "the document"
        shown = repr(item["input"]) if not isinstance(item["input"], dict) else "a mapping"
        found = "" if item["type"] == "missing" else f", found {shown}"
        lines.append(f"{where}: {key}: {item['msg']}{found}; {_allowed(model, item['loc'])}")
    return "\n".join(lines)


class _UniqueKeys(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # C is ten times as fast
    """YAML that refuses a key given twice: the second would silently win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]  # `<<` may be overridden
        keys = [self.construct_object(key, deep=deep) for key in own]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(
                None, None, f"key given twice: {', '.join(map(str, twice))}", node.start_mark
            )
        return super().construct_mapping(node, deep)


def load_yaml(path: Path, model: type[Model]) -> Model:
    """Read and check one YAML file; ConfigError for a missing file, bad YAML, unknown keys, wrong types."""
    try:
        return model.model_validate(yaml.load(path.read_text(), Loader=_UniqueKeys))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise ConfigError(explain(error, model, str(path))) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a character or a date that is none
        raise ConfigError(f"{path}: not valid YAML: {error}") from error


def point(experiment: str, values: dict[str, Any], where: str) -> Point:
    """Parameters of `experiment` from `values`; ConfigError lists known keys and allowed values at `where`."""
    parameters = experiments.get(experiment).parameters
    try:
        return parameters.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, parameters, where)) from error


def points(experiment: str, grid: Grid, where: str) -> list[Point]:
    """All points of a grid: the product of its lists, scalars kept as they are."""
    if empty := [key for key, values in grid.grid.items() if values == []]:
        raise ConfigError(
            f"{where}: {', '.join(empty)}: found an empty list, which makes no point; allowed: at least one value"
        )
    axes = [values if isinstance(values, list) else [values] for values in grid.grid.values()]
    return [point(experiment, dict(zip(grid.grid, c, strict=True)), where) for c in itertools.product(*axes)]


def platforms() -> list[str]:
    """Names of the platform files."""
    return sorted(path.stem for path in (paths.root() / "config/platforms").glob("*.yaml"))


def load(tier: str | None = None, platform: str | None = None) -> tuple[Config, Platform]:
    """The checked configuration with `tier` and `platform` from the arguments, the file, or the platform's default.

    Raises ConfigError for anything wrong in `config/`, including every grid of every tier.
    """
    path = paths.root() / "config/config.yaml"
    config = load_yaml(path, Config)
    where = "--platform" if platform else f"{path}: platform"
    config.platform = platform or config.platform
    if config.platform not in platforms():
        raise ConfigError(f"{where}: found {config.platform!r}; allowed: {', '.join(platforms())}")
    settings = load_yaml(paths.root() / f"config/platforms/{config.platform}.yaml", Platform)
    if tier is not None and tier not in get_args(Tier):
        raise ConfigError(f"--tier: found {tier!r}; allowed: {', '.join(get_args(Tier))}")
    config.tier = tier or config.tier or settings.tier
    _check_references(config, path)
    return config, settings


def results_folder(config: Config, platform: Platform) -> str:
    """Where runs of this tier on this platform go, relative to the root."""
    return f"results/{config.platform}" + ("" if config.tier == platform.tier else f"-{config.tier}")


def _check_references(config: Config, path: Path) -> None:
    """Names inside the file must exist: experiments, every point of every grid, the shipped records."""
    known = experiments.names()
    for name, experiment in config.experiments.items():
        if name not in known:
            raise ConfigError(f"{path}: experiments.{name}: no such experiment; allowed: {', '.join(known)}")
        for tier, grids in experiment.tiers.items():
            for number, grid in enumerate(grids):
                points(name, grid, f"{path}: experiments.{name}.tiers.{tier}.{number}.grid")
    shipped = [folder.name for folder in sorted((paths.root() / "results/reference").glob("*")) if folder.is_dir()]
    if shipped and config.reference not in shipped:
        raise ConfigError(f"{path}: reference: found {config.reference!r}; allowed: {', '.join(shipped)}")
