"""A torch optimizer on flat fp32 masters: each rank updates only its part of the optimizer partition."""

import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from repro.zero import names

# What the first three do to a value depends on the other values of its tensor, or of all: a flat part would train
# otherwise. SparseAdam takes sparse gradients only, and ours are dense.
NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)


@dataclass(frozen=True)
class Piece:
    """A run of values of a parameter in a flat tensor: `numel` of its `total` values, from flat position `start` on,
    at `offset` of the tensor."""

    name: str
    start: int
    numel: int
    offset: int
    total: int


def within(pieces: Iterable[Piece], first: int, numel: int) -> list[Piece]:
    """Of a tensor of `pieces` those, cut where needed, in its `numel` values from offset `first` on; new offsets are
    from there."""
    found = []
    for piece in pieces:
        start, stop = max(piece.offset, first), min(piece.offset + piece.numel, first + numel)
        if start < stop:
            moved = piece.start + start - piece.offset
            found.append(replace(piece, start=moved, numel=stop - start, offset=start - first))
    return found


@dataclass(frozen=True)
class Segment:
    """A run of a master that belongs to one parameter group: a parameter of the inner optimizer."""

    values: nn.Parameter
    group: int
    pieces: list[Piece]


class Masters:
    """`optimizer_cls` over this rank's masters, one flat fp32 tensor per bucket, cut where the parameter group changes.

    Any optimizer whose update is elementwise (SGD, Adam, AdamW, RMSprop, Adagrad, ...) gives exactly what it would give
    on the whole model; `require_elementwise` refuses the others. `inner` is the torch optimizer; `segments[i]` are
    views of `flat[i]`.

    flat       this rank's master of each bucket, fp32 [n], padding included
    pieces     what each of `flat` holds
    groups     options of each parameter group
    group_of   number of a parameter's group, by name
    options    further arguments of `optimizer_cls`
    """

    def __init__(
        self,
        flat: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]],
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        group_of: dict[str, int],
        options: dict[str, Any],
    ) -> None:
        self.flat = list(flat)
        self.segments = [_segments(tensor, mine, group_of) for tensor, mine in zip(flat, pieces, strict=True)]
        members = [[s.values for s in chain(*self.segments) if s.group == number] for number in range(len(groups))]
        filled = [options_of | {"params": params} for options_of, params in zip(groups, members, strict=True)]
        self.inner = optimizer_cls(filled, **options)
        self.group_of = group_of

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """One step with `gradients` (fp32, shaped like `flat`; None leaves a bucket alone)."""
        for segments, gradient in zip(self.segments, gradients, strict=True):
            sizes = [segment.values.numel() for segment in segments]
            parts = [None] * len(segments) if gradient is None else gradient.split(sizes)
            for segment, part in zip(segments, parts, strict=True):
                segment.values.grad = part
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def has_states(self, bucket: int) -> bool:
        """Whether the optimizer keeps states of this bucket: never for SGD without momentum, always for Adagrad, for
        Adam once it has been updated, here or before a checkpoint."""
        return any(self.inner.state.get(segment.values) for segment in self.segments[bucket])

    def held_bytes(self) -> int:
        """Bytes of masters and optimizer state (Adam: master, two moments and a step counter per segment)."""
        states = [value for state in self.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in (*self.flat, *states))


def require_elementwise(
    optimizer_cls: Callable[..., torch.optim.Optimizer], groups: Sequence[dict[str, Any]], options: dict[str, Any]
) -> None:
    """Build the optimizer on one dummy value per group, so that torch refuses bad options before a model is changed.

    Raises ValueError for one that is no torch optimizer, or not elementwise; torch's errors are as they are (ValueError
    for a value, TypeError for an option that the optimizer does not have).
    """
    if not callable(optimizer_cls):
        raise ValueError(
            f"optimizer_cls is a {type(optimizer_cls).__name__}, allowed: a class of torch.optim, or a function that "
            "makes such an optimizer of parameter groups"
        )
    _refuse_whole(optimizer_cls)
    made = optimizer_cls([group | {"params": [nn.Parameter(torch.zeros(1))]} for group in groups], **options)
    if not isinstance(made, torch.optim.Optimizer):
        raise ValueError(f"optimizer_cls makes a {type(made).__name__}, allowed: a torch.optim.Optimizer")
    _refuse_whole(type(made))


def _refuse_whole(kind: object) -> None:
    if isinstance(kind, type) and issubclass(kind, NOT_ELEMENTWISE):
        raise ValueError(
            f"{kind.__name__} is not elementwise, a rank with a part of a tensor cannot run it; allowed are optimizers "
            "that update every value by itself, such as SGD, Adam, AdamW, RMSprop, Adagrad"
        )


def parameter_groups(model: nn.Module, params: Iterable[Any] | None) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Options of each parameter group, and the group of each trainable parameter by name.

    Raises ValueError for a trainable parameter that no group has, or several have, and for what is no parameter of the
    model.
    """
    trainable = {name: parameter for name, parameter in names.parameters(model) if parameter.requires_grad}
    known = {id(parameter) for parameter in model.parameters()}
    if (params is not None and not isinstance(params, Iterable)) or isinstance(params, Tensor | str):
        raise ValueError(f"params is a {type(params).__name__}, allowed: parameters of the model, or parameter groups")
    given = list(trainable.values() if params is None else params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    group_of_id: dict[int, int] = {}
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise ValueError(f"params[{number}] is {reprlib.repr(group)}, allowed: a dictionary with a key 'params'")
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for member in members:
            if id(member) not in known:
                what = (
                    f"a tensor of shape {tuple(member.shape)}" if isinstance(member, Tensor) else reprlib.repr(member)
                )
                raise ValueError(f"params: group {number} has {what}, which is no parameter of the model")
            if group_of_id.setdefault(id(member), number) != number:
                raise ValueError(f"params: groups {group_of_id[id(member)]} and {number} have the same parameter")
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


def _segments(flat: Tensor, pieces: Sequence[Piece], group_of: dict[str, int]) -> list[Segment]:
    """A segment per run of one group; they cover the master, and padding belongs to the run before."""
    runs = [(group, next(run).offset) for group, run in groupby(pieces, key=lambda piece: group_of[piece.name])]
    groups = [group for group, _ in runs] or [0]  # nothing but padding
    bounds = [0, *(offset for _, offset in runs[1:]), flat.numel()]
    return [
        Segment(nn.Parameter(flat[start:stop]), group, within(pieces, start, stop - start))  # views: one memory
        for group, (start, stop) in zip(groups, pairwise(bounds), strict=True)
    ]
