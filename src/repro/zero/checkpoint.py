"""Save a training run under one plan and world size, and go on with it under another.

A rank's masters and moments are runs of values of parameters (`masters.Piece`). Every rank writes its runs, one of
those that hold the same; a rank that loads reads what its own runs need, from whichever files have it, and checks their
checksums. The 16-bit weights are not saved; they are made from the masters. `checkpoint_files` is what is on disk.

    folder/step-00000100/        complete: it gets this name when all ranks have written
    folder/.step-00000200/       being written, or removed; a killed run leaves it behind, and the next save removes it

A folder belongs to one run at a time. Loading runs no code of a checkpoint, whoever wrote it, and all ranks go on with
it or none: a load that fails, on one rank even, leaves all as they were.
"""

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from repro.zero import checkpoint_state
from repro.zero.checkpoint_files import (
    FORMAT,
    INDEX,
    CheckpointError,
    Index,
    read_index,
    sync_folder,
    write_index,
    write_runs,
)
from repro.zero.engine import ZeroOptimizer

T = TypeVar("T")
_STEPS = 2**63  # are below


def save(
    folder: Path | str, step: int, optimizer: ZeroOptimizer, extra: dict[str, Any] | None = None, keep: int = 2
) -> Path:
    """Write `folder/step-<step>` and remove those of earlier steps but the newest `keep - 1`; every rank calls it,
    after `optimizer.step()`.

    `folder` must be on a file system that all ranks share. `extra`: tensors, numbers, strings, and lists, tuples, sets
    and dicts of these, for example the state of a learning-rate schedule; rank 0's is saved, and so are rank 0's
    buffers. A run that is killed at any moment leaves the checkpoints that were complete.

    Raises ValueError for `step` and `keep`, TypeError for what cannot be saved, RuntimeError between a backward and its
    step and after a change of `requires_grad`, FileExistsError when the step is saved already, and OSError. What one
    rank raises the others raise as a CheckpointError. Then there is no new checkpoint, unless what failed was the
    removal of an old one. Returns the folder of the new checkpoint.
    """
    folder = Path(folder)
    with _all_or_none():
        final, partial = _named(folder, step), _named(folder, step, ".")
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep is {keep!r}, allowed: whole numbers from 1 on")
        if optimizer.has_gradients:
            raise RuntimeError("a checkpoint holds no gradients: save after step(), not between backward and step")
        optimizer.require_same_trained()
        if os.path.lexists(final):
            raise FileExistsError(f"{final} is there already")
        runs = checkpoint_state.runs(optimizer)
        if dist.get_rank() == 0:
            info, of_info = checkpoint_state.info(optimizer, extra)
            runs += of_info
            _sweep(folder)
            partial.mkdir(parents=True)
    writers = _writers(_gathered([(run.key, run.start, run.values.nbytes) for run in runs]))
    mine = [run for run in runs if writers[run.key, run.start] == dist.get_rank()]
    with _all_or_none():
        written = write_runs(partial, dist.get_rank(), mine)
    of_ranks = _gathered(written)
    with _all_or_none():
        if dist.get_rank() == 0:
            write_index(partial, step, info, of_ranks)
            os.rename(partial, final)
            sync_folder(folder)
            earlier = [other for other in steps(folder) if other < step]
            for old in earlier[::-1][keep - 1 :]:
                os.rename(_named(folder, old), _named(folder, old, "."))  # half removed, it must not seem complete
            _sweep(folder)
    return final


def load(folder: Path | str, optimizer: ZeroOptimizer, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Continue from the newest checkpoint of `folder` (or that of `step`). Every rank calls it.

    `optimizer` is new, made for the same model with any plan and world size; its masters, moments, parameter-group
    options and loss scale are replaced, and the model gets the weights. Gradients are dropped. Returns the step, and `extra` with its tensors on the CPU.

    Raises ValueError for `step`, and CheckpointError when the checkpoint is damaged or of another model or optimizer,
    or when a rank cannot read it. Then optimizer and model are as they were, on all ranks. To be sure of that, a rank
    reads into new memory, as much as its masters, moments, frozen parameters and buffers take, and replaces the old
    when every rank has all.
    """
    with _all_or_none():
        index = _open(folder, step)
        replacement = checkpoint_state.read(index, optimizer)
    if len(set(_gathered(index.text_sha256))) > 1:
        raise CheckpointError(f"{folder}: ranks see different checkpoints, rank {dist.get_rank()} {index.folder.name}")
    replacement.take_place(optimizer)
    return index.step, replacement.extra


def steps(folder: Path | str) -> list[int]:
    """Steps of the complete checkpoints in `folder`, oldest first."""
    return sorted(_folders(Path(folder), ""))


def consolidated(folder: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """The whole model as a state dict for `model.load_state_dict`, without a process group or an engine: floating-point
    tensors in fp32, other buffers as they are. Frozen weights have no fp32 master: they are rounded to `weight_dtype`.

    Takes the memory of the files of the model's values. Raises ValueError for `step`, and CheckpointError.
    """
    index = _open(folder, step)
    entries: dict[str, Tensor] = {}  # a tied parameter has several names and one entry
    found = {}
    for name, (kind, key, shape, _) in checkpoint_state.tensors_of(index).items():
        entry = f"{kind}/{key}"
        if entry not in entries:
            tensor = index.tensor(entry, shape)
            entries[entry] = tensor.float() if tensor.is_floating_point() else tensor
        found[name] = entries[entry]
    return found


# --- all ranks or none ---


@contextmanager
def _all_or_none() -> Iterator[None]:
    """What raises on one rank raises on all: there as it is, elsewhere as a CheckpointError that names the rank."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    raised = _gathered(f"{type(mine).__name__}: {mine}" if mine else None)
    if mine:
        raise mine
    for rank, what in enumerate(raised):
        if what:
            raise CheckpointError(f"rank {rank}: {what}")


def _gathered(value: T) -> list[T]:
    """`value` of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# --- folders ---


def _named(folder: Path, step: int, prefix: str = "") -> Path:
    if type(step) is not int or not 0 <= step < _STEPS:
        raise ValueError(f"step is {step!r}, allowed: whole numbers from 0 on")
    return folder / f"{prefix}step-{step:08d}"


def _folders(folder: Path, prefix: str) -> dict[int, Path]:
    """Folders of checkpoints by step; what has another name, or is a file or a link, is not ours."""
    found = {}
    for path in folder.glob(f"{prefix}step-*"):
        name = re.fullmatch(r"\.?step-([0-9]{8,19})", path.name)
        step = int(name[1]) if name else _STEPS
        if step < _STEPS and path == _named(folder, step, prefix) and path.is_dir() and not path.is_symlink():
            found[step] = path
    return found


def _sweep(folder: Path) -> None:
    """Remove what a killed run was writing or removing."""
    for left in _folders(folder, ".").values():
        shutil.rmtree(left)


def _open(folder: Path | str, step: int | None) -> Index:
    """Of the newest checkpoint, or of that of `step`."""
    folder = Path(folder)
    found = steps(folder)
    if not found:
        raise CheckpointError(f"{folder} has no complete checkpoint (a folder step-<number>)")
    path = _named(folder, found[-1] if step is None else step)
    if step is not None and step not in found:
        raise CheckpointError(f"{folder} has no step {step}; complete are {', '.join(map(str, found))}")
    if os.path.lexists(path / "info.pt") and not os.path.lexists(path / INDEX):
        raise CheckpointError(f"{path} has format 1, whose files could run code; this version reads {FORMAT}")
    index = read_index(path)
    if path.name != f"step-{index.step:08d}":
        raise CheckpointError(f"{path / INDEX} is of step {index.step}")
    return index


# --- who writes what ---


def _writers(runs_of_ranks: Sequence[Sequence[tuple[str, int, int]]]) -> dict[tuple[str, int], int]:
    """The rank that writes a run, by key and start: of those that hold it the one with the fewest bytes to write."""
    holders: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rank, runs in enumerate(runs_of_ranks):
        for run in runs:
            holders[run].append(rank)
    writers, load = {}, [0] * len(runs_of_ranks)
    for (key, start, nbytes), ranks in holders.items():
        writers[key, start] = rank = min(ranks, key=load.__getitem__)
        load[rank] += nbytes
    return writers
