"""A torch optimizer on flat fp32 masters: each rank updates only its part of the optimizer partition."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# What these do to a value depends on the other values of its tensor, or of all: a flat part would train otherwise.
NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)


@dataclass(frozen=True)
class Slice:
    """A run of values of one parameter in a rank's flat master: `numel` of them, from flat position `start` of the
    parameter `name`, at `offset` of the master. `group` is the parameter group."""

    name: str
    start: int
    numel: int
    offset: int
    group: int


class Masters:
    """`optimizer_cls` over this rank's masters, one flat fp32 tensor per bucket, cut where the parameter group changes.

    Any optimizer whose update is elementwise (SGD, Adam, AdamW, RMSprop, Adagrad, ...) gives exactly what it would give
    on the whole model; the others are refused with a ValueError. `inner` is the torch optimizer; `slices[i]` says what
    `flat[i]` holds.
    """

    def __init__(
        self,
        flat: Sequence[Tensor],
        slices: Sequence[Sequence[Slice]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        options: dict[str, Any],
    ) -> None:
        refused = isinstance(optimizer_cls, type) and issubclass(optimizer_cls, NOT_ELEMENTWISE)
        if refused:
            raise ValueError(
                f"{optimizer_cls.__name__} is not elementwise, a rank with a part of a tensor cannot run it; allowed "
                "are optimizers that update every value by itself, such as SGD, Adam, AdamW, RMSprop, Adagrad"
            )
        self.flat, self.slices = list(flat), list(slices)
        self._parts = [_parts(tensor.numel(), mine) for tensor, mine in zip(flat, slices, strict=True)]
        members: list[list[nn.Parameter]] = [[] for _ in groups]
        self._segments: list[list[nn.Parameter]] = []
        for tensor, parts in zip(self.flat, self._parts, strict=True):
            segments = [nn.Parameter(tensor[start:stop]) for start, stop, _ in parts]  # views: one memory
            for segment, (_, _, group) in zip(segments, parts, strict=True):
                members[group].append(segment)
            self._segments.append(segments)
        filled = [options_of | {"params": params} for options_of, params in zip(groups, members, strict=True)]
        self.inner = optimizer_cls(filled, **options)

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One step with `gradients` (fp32, shaped like `flat`; None leaves a bucket alone)."""
        for segments, parts, gradient in zip(self._segments, self._parts, gradients, strict=True):
            for segment, (start, stop, _) in zip(segments, parts, strict=True):
                segment.grad = None if gradient is None else gradient[start:stop]
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def state(self, bucket: int) -> Iterable[tuple[int, nn.Parameter, dict[str, Any], dict[str, Any]]]:
        """(start in the master, segment, its group's options, its optimizer state) for each segment of a bucket."""
        for segment, (start, _, group) in zip(self._segments[bucket], self._parts[bucket], strict=True):
            yield start, segment, self.inner.param_groups[group], self.inner.state[segment]

    def held_bytes(self) -> int:
        """Bytes of masters and optimizer state (Adam: master, two moments and a step counter per segment)."""
        states = [value for state in self.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in (*self.flat, *states))


def parameter_groups(model: nn.Module, params: Iterable[Any] | None) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Options of each parameter group, and the group of each trainable parameter by name.

    Raises ValueError for a trainable parameter that no group has.
    """
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    given = list(trainable.values() if params is None else params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    group_of_id: dict[int, int] = {}
    for number, group in enumerate(groups):
        members = group["params"]
        group_of_id |= {id(p): number for p in ([members] if isinstance(members, Tensor) else members)}
    if missing := [name for name, parameter in trainable.items() if id(parameter) not in group_of_id]:
        raise ValueError(
            f"parameter {missing[0]} requires a gradient but is in no parameter group: freeze it "
            f"(requires_grad_(False)) or add it ({len(missing)} such)"
        )
    options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return options, {name: group_of_id[id(parameter)] for name, parameter in trainable.items()}


def global_norm(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """2-norm over all values of `gradients` on the ranks of `group` (None: this rank holds all), an fp32 scalar."""
    squares = torch.stack([norm.square() for norm in torch._foreach_norm(list(gradients))]).sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def _parts(numel: int, slices: Sequence[Slice]) -> list[tuple[int, int, int]]:
    """(start, stop, group) of the runs of one group, which cover the master; padding belongs to the run before."""
    runs = [(next(iter(run)).offset, group) for group, run in groupby(slices, key=lambda piece: piece.group)]
    starts = [0, *(offset for offset, _ in runs[1:])]
    stops = [*starts[1:], numel]
    groups = [group for _, group in runs] or [0]  # nothing but padding
    return list(zip(starts, stops, groups, strict=True))
