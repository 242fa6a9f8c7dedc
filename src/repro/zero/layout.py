"""Sizes of a model's buckets, without the model's memory: what `memory`, `traffic` and the search compute with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from repro.zero.buckets import default_buckets

Shape = tuple[int, ...]
NO_ROWS = "has no dimension: give it one, [1], because rows are what is shared out"


@dataclass(frozen=True)
class BucketLayout:
    """Shapes of the parameters that travel together."""

    trainable: tuple[Shape, ...]
    frozen: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Buckets of a model in the engine's order, the root's last."""

    buckets: tuple[BucketLayout, ...]

    @property
    def parameters(self) -> int:
        """Number of values, frozen ones included."""
        return sum(math.prod(shape) for bucket in self.buckets for shape in (*bucket.trainable, *bucket.frozen))


def layout(model: nn.Module, buckets: Sequence[nn.Module] | None = None) -> Layout:
    """The buckets of `model`, which may be on the meta device; `buckets` as for `ZeroOptimizer`. ValueError for a
    parameter without a dimension."""
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ValueError(f"model: parameter {name} {NO_ROWS}")
    taken: set[int] = set()
    found = []
    for module in (*(default_buckets(model) if buckets is None else buckets), model):
        mine = [parameter for parameter in module.parameters() if id(parameter) not in taken]
        taken |= {id(parameter) for parameter in mine}
        trainable = tuple(tuple(parameter.shape) for parameter in mine if parameter.requires_grad)
        frozen = tuple(tuple(parameter.shape) for parameter in mine if not parameter.requires_grad)
        found.append(BucketLayout(trainable, frozen))
    return Layout(tuple(found))


def shard_numel(shapes: Sequence[Shape], ranks: int) -> int:
    """Values of one rank's shard when `ranks` share the rows of each parameter, padding included (FSDP pads rows)."""
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in shapes)


def up_to_multiple(numel: int, of: int) -> int:
    """`numel` rounded up to a multiple of `of`."""
    return -(-numel // of) * of
