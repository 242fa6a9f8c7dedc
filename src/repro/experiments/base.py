"""What an experiment is: points, metrics with units, and a function from a point to an outcome.

The package of an experiment defines a `Point`, a `Metrics` and `EXPERIMENT` in its `__init__`, which imports no engine.
Its module `run` has the function `run(point) -> Outcome` and is imported when a point runs. It knows nothing of files.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, get_args

from pydantic import Field, create_model, model_validator

from repro.records.record import Evidence, Metric, Strict

if TYPE_CHECKING:
    import pandas as pd

# --- points --------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Where the ranks of a point sit: so many nodes, packages per node, and ranks per package."""

    nodes: int = 1
    packages: int = 1
    gcds: int = 1

    @property
    def in_node(self) -> int:
        return self.packages * self.gcds

    @property
    def ranks(self) -> int:
        return self.nodes * self.in_node


class Point(Strict, frozen=True):
    """Parameters of one point. Subclasses add fields with defaults. An unknown key is an error."""

    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if found := "; ".join(self.contradictions()):
            raise ValueError(found)
        return self

    def contradictions(self) -> Iterator[str]:
        """What is wrong with fields that are each right: their names, what was found, what is allowed."""
        yield from ()

    @property
    def label(self) -> str:
        """Readable part of the record's file name, such as `zeropp-2x2x2`."""
        return f"seed{self.seed}"

    @property
    def shape(self) -> Shape:
        """One process, unless the point runs on ranks (`repro.experiments.common.ranks`)."""
        return Shape()

    @property
    def one_machine(self) -> bool:
        """Whether the ranks need memory that all of them see."""
        return False


# --- metrics -------------------------------------------------------------------------------------------------------


# A float and its unit, as a record gives it. `Number` is for counts and shares, `Ratio` for a quotient of two numbers
# of the same kind.
Number = Annotated[float, "1"]
Ratio = Annotated[float, "×"]
Seconds = Annotated[float, "s"]
Bytes = Annotated[float, "bytes"]
Gigabytes = Annotated[float, "GB"]
BytesPerSecond = Annotated[float, "bytes/s"]
PerSecond = Annotated[float, "1/s"]
Tflops = Annotated[float, "TFLOP/s"]
Tokens = Annotated[float, "tokens"]
TokensPerSecond = Annotated[float, "tokens/s"]
SecondsPerToken = Annotated[float, "s/token"]
HopsPerToken = Annotated[float, "hops/token"]
Bits = Annotated[float, "bits"]
Nats = Annotated[float, "nats"]
BillionParameters = Annotated[float, "10⁹ parameters"]


class Metrics(Strict, frozen=True):
    """The numbers of a run. The type of a field is its unit. Fields that not every run reports default to None."""

    @classmethod
    def units(cls) -> dict[str, str]:
        """Unit of every field: of `Seconds` as of `Seconds | None` it is "s"."""
        fields = cls.model_fields.items()
        return {name: (each.metadata or get_args(each.annotation)[0].__metadata__)[0] for name, each in fields}

    def with_units(self) -> dict[str, Metric]:
        """The reported numbers as a record holds them."""
        units = self.units()
        return {name: Metric(value=value, unit=units[name]) for name, value in self if value is not None}


def metrics(kind: Any, *names: str) -> type[Metrics]:
    """A base class with a field of type `kind` for each of `names`, by default None where `kind` allows it."""
    default = None if type(None) in get_args(kind) else ...
    return create_model("Pattern", __base__=Metrics, **{name: (kind, default) for name in names})


def prefixed(prefix: str, kind: type[Metrics]) -> type[Metrics]:
    """A base class with the fields of `kind`, their names after `prefix`."""
    fields = {f"{prefix}{name}": (each.annotation, each) for name, each in kind.model_fields.items()}
    return create_model("Prefixed", __base__=Metrics, **fields)


def bands(kind: Any, *names: str) -> type[Metrics]:
    """Like `metrics`, for modelled numbers: `name` is the median, `name_low` and `name_high` end the 95 % band."""
    return metrics(kind, *(f"{name}{end}" for name in names for end in ("_low", "", "_high")))


# --- experiments ---------------------------------------------------------------------------------------------------


class MissingHardware(RuntimeError):
    """This machine lacks what the point needs. Recorded as *skipped* with the message as the reason."""


@dataclass(frozen=True)
class Outcome:
    """What a point yields. `conditions`: what the numbers depend on beyond the point, as `{"fabric": "shaped"}`."""

    metrics: Metrics
    evidence: Evidence = "measured"
    conditions: dict[str, str] = field(default_factory=dict)
    series: "pd.DataFrame | None" = None
    topology: str = ""


@dataclass(frozen=True)
class Experiment:
    """One experiment.

    conditions  names of all conditions that a record can hold
    memory      predicted bytes per rank; None where they are unknown
    timeout_s   limit of one run
    timed       claims are about time, so nothing else may run on the machine meanwhile
    predicts    by experiment, a function of a point of it and of a platform's hardware: seconds of a run, or None
    """

    parameters: type[Point]
    metrics: type[Metrics]
    conditions: tuple[str, ...] = ()
    memory: Callable[[Any], float | None] = lambda point: None
    timeout_s: float = 600.0
    timed: bool = True
    predicts: Mapping[str, Callable[[Any, str], float | None]] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """Every parameter as it is when nobody says it."""
        return {name: each.default for name, each in self.parameters.model_fields.items()}

    def run(self, point: Any) -> Outcome:
        """What `run` in the module `run` of the experiment's package yields. The module is imported now."""
        return importlib.import_module(f"{self.parameters.__module__}.run").run(point)

    def prepare(self, point: Any) -> None:
        """Import that module, and call its `prepare` if it has one: what every point needs and can share, loaded before
        each gets a process of its own. Nothing that starts threads, which a fork does not take along."""
        module = importlib.import_module(f"{self.parameters.__module__}.run")
        getattr(module, "prepare", lambda point: None)(point)

    def check(self, outcome: Outcome) -> Outcome:
        """The outcome; AssertionError for metrics of another class or an unknown condition."""
        assert isinstance(outcome.metrics, self.metrics), f"found {type(outcome.metrics).__name__}"
        unknown = outcome.conditions.keys() - set(self.conditions)
        assert not unknown, f"not in the experiment's `conditions`: {', '.join(sorted(unknown))}"
        return outcome
