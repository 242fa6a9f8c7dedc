"""How long an iteration and a prompt take: by the paper's formula, or between the points of a measured grid."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator


def check_least(owner: Any, **least: float) -> None:
    """ValueError that names the first field of a dataclass that is NaN or below its least value, or that is an `int` and
    holds no whole number. A field that is None passes."""
    counts = {each.name for each in fields(owner) if each.type is int}
    for name, lowest in least.items():
        value = getattr(owner, name)
        if value is not None and not value >= lowest:
            raise ValueError(f"{name} is {value}, must be at least {lowest:g}")
        if name in counts and not isinstance(value, Integral):
            raise ValueError(f"{name} is {value}, must be a whole number")


class Times(Protocol):
    """Seconds that a model takes."""

    def decode(self, batch: int, context: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of iterations over `batch` rows, [k], for each of `context` [k] (may be empty): the most tokens that a row
        has stored."""

    def prefill(self, tokens: int, start: int = 0) -> float:
        """Of so many tokens of a prompt behind its first `start`, in a pass of their own."""

    @property
    def floor_s(self) -> float:
        """What every pass takes, however little is in it: parts that share a pass take it once."""


@runtime_checkable
class WholePasses(Protocol):
    """`Times` that know what a pass of several parts takes, which need not be their sum without what they share."""

    def mixed(self, batch: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Of one pass, as `pass_s` takes it."""


def pass_s(times: Times, batch: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
    """Seconds of one pass: a token for each of `batch` rows of up to `context` tokens, and `chunks` (tokens, start). As
    `times` say of `WholePasses`; else its parts together, and `floor_s` once."""
    if isinstance(times, WholePasses):
        return times.mixed(batch, context, chunks)
    parts = [times.prefill(tokens, start) for tokens, start in chunks]
    if batch:
        parts.append(float(times.decode(batch, np.array([context]))[0]))
    return sum(parts) - times.floor_s * (len(parts) - 1)


@dataclass(frozen=True)
class LinearTimes:
    """t1 (1 + c (b - 1)), whatever the context, and prompts at a cost per token: decoding is bound by reading the
    weights, which all requests share, and `batch_cost` c is what each further request adds. `iteration_s`: t1, seconds.
    ValueError for `iteration_s` of 0 or less, and for other values below 0."""

    iteration_s: float
    batch_cost: float = 0.0
    prefill_s_per_token: float = 0.0
    floor_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if not self.iteration_s > 0:
            raise ValueError(f"iteration_s is {self.iteration_s}, must be above 0")
        check_least(self, batch_cost=0, prefill_s_per_token=0)

    def decode(self, batch: int, context: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(len(context), self.iteration_s * (1 + self.batch_cost * (batch - 1)))

    def prefill(self, tokens: int, start: int = 0) -> float:
        return tokens * self.prefill_s_per_token


@dataclass(frozen=True)
class MeasuredTimes:
    """Linear between measured points; below the smallest context, prompt or start as there, above a ValueError, as for a
    batch below 1.

    Ascending int64 `batches` [B] from 1, `contexts` [C], `prompts` [P], `starts` [S] (tokens); fp64 seconds `decode_s`
    [B, C], `prefill_s` [P, S], above 0. ValueError where they are not so.
    """

    batches: NDArray[np.int64]
    contexts: NDArray[np.int64]
    decode_s: NDArray[np.float64]
    prompts: NDArray[np.int64]
    starts: NDArray[np.int64]
    prefill_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        for values, axes in (("decode_s", ("batches", "contexts")), ("prefill_s", ("prompts", "starts"))):
            for axis in axes:
                if len(getattr(self, axis)) < 1 or np.any(np.diff(getattr(self, axis)) <= 0):
                    raise ValueError(f"{axis} is {getattr(self, axis)}, must be at least one number, ascending")
            shape = tuple(len(getattr(self, axis)) for axis in axes)
            if getattr(self, values).shape != shape or not np.all(getattr(self, values) > 0):
                raise ValueError(f"{values} has the shape {getattr(self, values).shape}, must be {shape}, all above 0")
        if self.batches[0] != 1:
            raise ValueError(f"batches begins with {self.batches[0]}, must begin with 1")

    def decode(self, batch: int, context: NDArray[np.int64]) -> NDArray[np.float64]:
        if batch < 1:
            raise ValueError(f"batch is {batch}, must be at least 1")
        self._check(batch=(batch, self.batches), context=(int(np.max(context, initial=0)), self.contexts))
        return self._decode[batch - 1, np.maximum(context, self.contexts[0]) - self.contexts[0]]

    def prefill(self, tokens: int, start: int = 0) -> float:
        self._check(tokens=(tokens, self.prompts), start=(start, self.starts))
        return float(self._prefill[max(tokens - self.prompts[0], 0), max(start - self.starts[0], 0)])

    @cached_property
    def floor_s(self) -> float:
        """The least that any measured pass took: reading the weights, mostly."""
        return float(min(self.decode_s.min(), self.prefill_s.min()))

    @staticmethod
    def _check(**asked: tuple[int, NDArray[np.int64]]) -> None:
        for name, (value, measured) in asked.items():
            if value > measured[-1]:
                raise ValueError(f"{name} is {value}, but was measured up to {measured[-1]} only")

    @cached_property
    def _decode(self) -> NDArray[np.float64]:
        """[batch, context] for all whole numbers between the ends: looking up is all that the model then does."""
        return _filled((self.batches, self.contexts), self.decode_s)

    @cached_property
    def _prefill(self) -> NDArray[np.float64]:
        return _filled((self.prompts, self.starts), self.prefill_s)


def _filled(axes: tuple[NDArray[np.int64], ...], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear interpolation at every whole number of each axis. An axis of one point is that point."""
    long = tuple(np.arange(axis[0], axis[-1] + 1) for axis in axes)
    # The interpolator wants two points at least.
    padded = [axis if len(axis) > 1 else np.array([axis[0], axis[0] + 1]) for axis in axes]
    repeats = [slice(None) if len(axis) > 1 else [0, 0] for axis in axes]
    values = values[repeats[0]][:, repeats[1]]
    return RegularGridInterpolator(padded, values)(np.stack(np.meshgrid(*long, indexing="ij"), -1))
