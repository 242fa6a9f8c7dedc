"""What of an optimizer and its model is in a checkpoint, whether a checkpoint is of them, and what it puts in its place."""

import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from repro.zero import names
from repro.zero.checkpoint_files import DTYPES, INDEX, CheckpointError, Entry, Index, Run, info_key
from repro.zero.checkpoint_json import to_json
from repro.zero.engine import ZeroOptimizer
from repro.zero.loss_scale import LossScale
from repro.zero.masters import Piece, Segment
from repro.zero.materialise import once

# Kinds of tensors, the first part of a key such as "master/blocks.0.up.weight" or "state/exp_avg/blocks.0.up.weight".
MASTER, STATE, NUMBER, FROZEN, BUFFER, INFO = "master", "state", "number", "frozen", "buffer", "info"
_FLOATS = tuple(dtype for dtype in DTYPES.values() if dtype.is_floating_point)

# --- what there is to save ---


def runs(optimizer: ZeroOptimizer) -> list[Run]:
    """Masters with their optimizer states, and frozen parameters of this rank; on rank 0 the buffers.

    TypeError for an optimizer state other than a tensor of the segment's shape or of one value. (Adam's step has one.)
    """
    found = []
    for segment in chain(*optimizer.masters.segments):
        for piece in segment.pieces:
            found.append(_run(MASTER, piece, segment.values))
            for name, value in optimizer.masters.inner.state[segment.values].items():
                if isinstance(value, Tensor) and value.shape == segment.values.shape:
                    found.append(_run(f"{STATE}/{name}", piece, value))
                elif isinstance(value, Tensor) and value.numel() == 1:
                    found.append(Run(f"{NUMBER}/{name}/{piece.name}", 0, 1, value.view(1)))
                else:
                    what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise TypeError(
                        f"optimizer state {name!r} is {what}: only tensors like the parameter or of one value"
                    )
    found += [_run(FROZEN, piece, values) for piece, values in _frozen(optimizer)]
    if dist.get_rank() == 0:
        buffers = names.saved_buffers(optimizer.model)
        found += [Run(f"{BUFFER}/{name}", 0, buffer.numel(), buffer.reshape(-1)) for name, buffer in buffers.items()]
    return found


def info(optimizer: ZeroOptimizer, extra: dict[str, Any] | None) -> tuple[dict[str, Any], list[Run]]:
    """What is no tensor of the training state, as JSON has it, and the tensors that are in it. TypeError."""
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(f"extra is a {type(extra).__name__}, allowed: a dict")
    found = {
        "tensors": _tensors(optimizer),
        "optimizer": type(optimizer.masters.inner).__name__,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "loss_scale": optimizer.loss_scale.state_dict() if optimizer.loss_scale else None,
        "extra": extra or {},
    }
    tensors: list[Tensor] = []
    as_json = {name: to_json(value, tensors, name) for name, value in found.items()}
    return as_json, [Run(info_key(n), 0, t.numel(), t.detach().reshape(-1)) for n, t in enumerate(tensors)]


def _tensors(optimizer: ZeroOptimizer) -> dict[str, list]:
    """Kind, key, shape and parameter group (None without) of each tensor of the model, by its name in a state dict."""
    first_name = {id(parameter): name for name, parameter in names.parameters(optimizer.model)}
    tensors = {}
    for name, parameter in names.parameters(optimizer.model, remove_duplicate=False):
        kind, key = MASTER if parameter.requires_grad else FROZEN, first_name[id(parameter)]
        tensors[name] = [kind, key, list(parameter.shape), optimizer.masters.group_of.get(key)]
    buffers = names.saved_buffers(optimizer.model)
    return tensors | {name: [BUFFER, name, list(buffer.shape), None] for name, buffer in buffers.items()}


def _frozen(optimizer: ZeroOptimizer) -> list[tuple[Piece, Tensor]]:
    """This rank's values of frozen parameters."""
    known = {id(parameter): name for name, parameter in names.parameters(optimizer.model)}
    found = chain(*(bucket.sharded.frozen(known) for bucket in optimizer.all_buckets))
    return [(replace(piece, offset=0), values) for piece, values in found if piece.numel]


def _run(kind: str, piece: Piece, values: Tensor) -> Run:
    return Run(f"{kind}/{piece.name}", piece.start, piece.total, _of(piece, values))


def _of(piece: Piece, values: Tensor) -> Tensor:
    return values.detach()[piece.offset :][: piece.numel]


# --- is a checkpoint of this model and optimizer? ---


def tensors_of(index: Index) -> dict[str, list]:
    """Of the model that was saved: kind, key, shape and parameter group by name. CheckpointError."""
    tensors = index.info("tensors")
    rows = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(row, list) and len(row) == 4 for row in rows):
        raise CheckpointError(
            f"{index.folder / INDEX}: 'tensors' of 'info', allowed: [kind, key, shape, group] by name"
        )
    return tensors


def _check(index: Index, optimizer: ZeroOptimizer) -> None:
    """All that can be known before values are read. CheckpointError."""
    path, wanted, found = index.folder, _tensors(optimizer), tensors_of(index)
    for name in sorted(wanted.keys() ^ found.keys(), key=str):
        raise CheckpointError(f"{path}: {name} is in the {'model' if name in wanted else 'checkpoint'} only")
    for name in wanted:
        if wanted[name] != found[name]:
            raise CheckpointError(f"{path}: {name} is {found[name]}, in the model {wanted[name]}")
    saved_from, inner = index.info("optimizer"), type(optimizer.masters.inner).__name__
    if saved_from != inner:
        raise CheckpointError(f"{path} was saved from the optimizer {saved_from}, this one is {inner}")
    _check_entries(index, optimizer)
    _check_states(index, optimizer.masters.group_of)


def _check_entries(index: Index, optimizer: ZeroOptimizer) -> None:
    """The entries are those of the model, with as many values, of a dtype that can take their place."""
    numel = {f"{kind}/{key}": math.prod(shape) for kind, key, shape, _ in _tensors(optimizer).values()}
    dtypes = {f"{BUFFER}/{name}": buffer.dtype for name, buffer in names.saved_buffers(optimizer.model).items()}
    for key in numel.keys() - index.entries.keys():
        raise CheckpointError(f"{index.folder}: {key} is in no file")
    for key, entry in index.entries.items():
        kind, _, rest = key.partition("/")
        of = f"{MASTER}/{rest.partition('/')[2]}" if kind in (STATE, NUMBER) else key
        if kind == INFO:
            continue
        if of not in numel:
            raise CheckpointError(f"{index.folder}: {key} is of no tensor of the model")
        if entry.numel != (wanted := 1 if kind == NUMBER else numel[of]):
            raise CheckpointError(f"{index.folder}: {key} has {entry.numel} values, in the model {wanted}")
        # Frozen parameters have the dtype of the weights, and floating-point buffers one of their own: both may be another now.
        own = {MASTER: torch.float32, FROZEN: optimizer.weight_dtype}.get(kind, dtypes.get(key, entry.dtype))
        if entry.dtype not in (own, *(_FLOATS if own in _FLOATS and kind != MASTER else ())):
            raise CheckpointError(f"{index.folder}: {key} is {entry.dtype}, in the model {own}")


def _states_of(index: Index) -> dict[str, dict[str, tuple[str, Entry]]]:
    """Of each parameter the optimizer's states by name: kind (a value per value, or one number) and entry."""
    found: dict[str, dict[str, tuple[str, Entry]]] = defaultdict(dict)
    for key, entry in index.entries.items():
        kind, _, rest = key.partition("/")
        if kind in (STATE, NUMBER):
            state, _, name = rest.partition("/")
            found[name][state] = (kind, entry)
    return found


def _check_states(index: Index, group_of: dict[str, int]) -> None:
    """Those parameters of a group that have states have the same ones."""
    first: dict[int, tuple[str, dict]] = {}
    for name, states in _states_of(index).items():
        found = {state: f"{kind} of {entry.dtype}" for state, (kind, entry) in sorted(states.items())}
        other, wanted = first.setdefault(group_of[name], (name, found))
        if found != wanted:
            raise CheckpointError(f"{index.folder}: {name} has the states {found}, {other} has {wanted}")


def _options(index: Index, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Options of the parameter groups that were saved. CheckpointError unless they fit those of `groups`."""
    path, found = index.folder, index.info("groups")
    if not isinstance(found, list) or len(found) != len(groups):
        many = len(found) if isinstance(found, list) else repr(found)
        raise CheckpointError(f"{path} has {many} parameter groups, the optimizer {len(groups)}")
    for number, (saved, own) in enumerate(zip(found, groups, strict=True)):
        if not isinstance(saved, dict) or "params" in saved:
            raise CheckpointError(f"{path}: parameter group {number} is {saved!r}, allowed: options by name")
        for key, value in saved.items():
            if not _alike(value, own.get(key)):
                what = f"option {key!r} of parameter group {number}"
                raise CheckpointError(f"{path}: {what} is {value!r}, in the optimizer {own.get(key)!r}")
            if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                saved[key] = value.to(own[key].device)
    return found


def _alike(saved: Any, own: Any) -> bool:
    """Whether an option's value can take the place of another."""
    if saved is None or own is None or (_is_number(saved) and _is_number(own)):
        return True
    return type(saved) is type(own) and (not isinstance(own, tuple) or len(saved) == len(own))


def _is_number(value: Any) -> bool:
    scalar = isinstance(value, Tensor) and value.numel() == 1
    return scalar or (isinstance(value, int | float) and not isinstance(value, bool))


def _loss_scale(index: Index) -> dict[str, Any] | None:
    found = index.info("loss_scale")
    if found is None:
        return None
    try:
        value, *counters = found["value"], found["good_steps"], found["skipped"]
        if isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError("'value' is a finite number above 0")
        if not all(type(counter) is int and counter >= 0 for counter in counters):
            raise ValueError("'good_steps' and 'skipped' are whole numbers from 0 on")
        LossScale().load_state_dict(found)  # what it refuses, it refuses now
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{index.folder}: loss_scale is {found!r}: {error}") from error
    return found


# --- what a checkpoint puts in place ---


@dataclass
class Replacement:
    """What a checkpoint has for this rank, in memory of its own: nothing is changed before `take_place`."""

    values: list[tuple[Tensor, Tensor]]  # a tensor of the optimizer or the model, and its new values
    states: dict[Tensor, dict[str, Tensor]]  # by the values of a segment
    options: list[dict[str, Any]]
    loss_scale: dict[str, Any] | None
    extra: dict[str, Any]

    def take_place(self, optimizer: ZeroOptimizer) -> None:
        """Copy all of it into the optimizer and its model, and send the weights to all ranks; every rank calls it."""
        optimizer.zero_grad()
        optimizer.synchronize()  # masters that are still being sent do not change
        optimizer.discard()  # frozen weights change as well
        with torch.no_grad():
            for old, new in self.values:
                once(old, old).copy_(once(old, new))
        optimizer.masters.inner.state.update(self.states)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)
        if self.loss_scale and optimizer.loss_scale:
            optimizer.loss_scale.load_state_dict(self.loss_scale)
        optimizer.publish()


def read(index: Index, optimizer: ZeroOptimizer) -> Replacement:
    """What the checkpoint has for this rank. CheckpointError when it is of another model, or damaged."""
    _check(index, optimizer)
    if not isinstance(extra := index.info("extra"), dict):
        raise CheckpointError(f"{index.folder}: extra is {extra!r}, allowed: a dict")
    found = Replacement([], {}, _options(index, optimizer.param_groups), _loss_scale(index), extra)
    saved = _states_of(index)
    for master, segments in zip(optimizer.masters.flat, optimizer.masters.segments, strict=True):
        new = torch.zeros_like(master)  # the padding between parameters: it shares quantisation blocks with values
        found.values.append((master, new))
        parts = new.split([segment.values.numel() for segment in segments])
        for segment, part in zip(segments, parts, strict=True):
            _fill(index, MASTER, segment.pieces, part)
            options = optimizer.param_groups[segment.group] | found.options[segment.group]
            found.states[segment.values] = _states(index, options, segment, saved)
    for piece, old in _frozen(optimizer):
        new = torch.empty_like(_of(piece, old))
        _fill(index, FROZEN, [piece], new)
        found.values.append((_of(piece, old), new))
    for name, buffer in names.saved_buffers(optimizer.model).items():
        new = torch.empty_like(buffer, memory_format=torch.contiguous_format)
        index.fill(f"{BUFFER}/{name}", 0, new.view(-1))
        part = once(buffer, new)
        if part.shape != new.shape and not torch.equal(part.expand_as(new), new):
            one = f"{name} of shape {list(buffer.shape)} is expanded in the model, and has one place"
            raise CheckpointError(f"{index.folder}: {one} for what are several values")
        found.values.append((buffer, new))
    return found


def _states(
    index: Index, options: dict[str, Any], segment: Segment, saved: dict[str, dict[str, tuple[str, Entry]]]
) -> dict[str, Tensor]:
    """Optimizer states of a segment: a tensor like it, or one number for all its parameters. `options`: of its group, as they
    will be."""
    known: list[str] = [piece.name for piece in segment.pieces]
    found: dict[str, Tensor] = {}
    for name in known:
        if saved.get(name, {}).keys() != saved.get(known[0], {}).keys():
            raise CheckpointError(
                f"{index.folder}: of {name} and {known[0]}, which are in one bucket, one has no states"
            )
    for state, (kind, entry) in saved.get(known[0], {}).items() if known else ():
        if kind == STATE:
            found[state] = torch.zeros_like(segment.values, dtype=entry.dtype)
            _fill(index, f"{STATE}/{state}", segment.pieces, found[state])
            continue
        numbers = {name: index.tensor(f"{NUMBER}/{state}/{name}", [1]) for name in known}
        for name, number in numbers.items():
            if not torch.equal(number, numbers[known[0]]):
                both = f"{number.item()} for {name} and {numbers[known[0]].item()} for {known[0]}"
                raise CheckpointError(f"{index.folder}: {state} is {both}, which are in one bucket")
        # On the CPU unless a kernel reads it.
        device = segment.values.device if options.get("fused") or options.get("capturable") else "cpu"
        found[state] = numbers[known[0]].view(()).to(device)
    return found


def _fill(index: Index, kind: str, pieces: Sequence[Piece], out: Tensor) -> None:
    for piece in pieces:
        index.fill(f"{kind}/{piece.name}", piece.start, _of(piece, out))
