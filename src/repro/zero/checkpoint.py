"""Save a training run under one plan and world size, and go on with it under another.

A rank's masters and moments are runs of values of parameters (`masters.Piece`), so a checkpoint is a set of flat
tensors, one per parameter and kind of state, of which every rank writes and reads its runs:
`torch.distributed.checkpoint` finds which files they are in. The 16-bit weights are not saved; they are made from the
masters.

    folder/step-00000100/        complete: it gets this name when all ranks have written
    folder/.step-00000200        being written; a killed run leaves it behind, and the next save removes it
"""

import math
import os
import re
import shutil
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from repro.zero.engine import ZeroOptimizer
from repro.zero.masters import Piece

FORMAT = 1
_INFO = "info.pt"
# Kinds of tensors, the first part of a key such as "master/blocks.0.up.weight" or "state/exp_avg/blocks.0.up.weight".
_MASTER, _STATE, _NUMBER, _FROZEN, _BUFFER = "master", "state", "number", "frozen", "buffer"


class CheckpointError(ValueError):
    """There is no checkpoint, or it is of another model: the message names the folder and the parameter."""


@dataclass(frozen=True)
class Run:
    """A run of a flat tensor of `total` values, from `start` on: `values` is where they are in memory.

    The two methods tell `torch.distributed.checkpoint` which part of the tensor this is, as a DTensor's do.
    """

    values: Tensor
    start: int
    total: int

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.values.numel()]))]

    def __create_write_items__(self, key: str, run: "Run") -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self.values), torch.Size([self.total]))
        return [WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]


def save(
    folder: Path | str, step: int, optimizer: ZeroOptimizer, extra: dict[str, Any] | None = None, keep: int = 2
) -> Path:
    """Write `folder/step-<step>` and keep the newest `keep` checkpoints; every rank calls it, after `optimizer.step()`.

    `folder` must be on a file system that all ranks share. `extra`: tensors, numbers, strings and containers of these,
    for example the state of a learning-rate schedule; rank 0's is saved. A run that is killed at any moment leaves the
    checkpoints that were complete.

    Raises RuntimeError between a backward and its step, FileExistsError when the step is saved already.
    """
    if optimizer.has_gradients:
        raise RuntimeError("a checkpoint holds no gradients: save after step(), not between backward and step")
    folder = Path(folder)
    final, partial = folder / f"step-{step:08d}", folder / f".step-{step:08d}"
    if final.exists():
        raise FileExistsError(f"{final} is there already")
    if dist.get_rank() == 0:
        for left in folder.glob(".step-*"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)
    dist.barrier()
    writer = dcp.FileSystemWriter(partial)
    dcp.save(_runs(optimizer), storage_writer=writer, planner=_Save(flatten_state_dict=False))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(_info(optimizer, extra), partial / _INFO)
        _sync(partial / _INFO)
        os.rename(partial, final)
        _sync(folder)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old:08d}")
    dist.barrier()
    return final


def load(folder: Path | str, optimizer: ZeroOptimizer, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Continue from the newest checkpoint of `folder` (or that of `step`): (step, extra). Every rank calls it.

    `optimizer` is new, made for the same model with any plan and world size; its masters, moments, parameter-group
    options and loss scale are replaced, and the model gets the weights. Raises CheckpointError.
    """
    path, step, info = _open(folder, step)
    _check(path, info, optimizer)
    reader = dcp.FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    for master in optimizer.masters.flat:
        master.zero_()  # the padding between parameters: it shares quantisation blocks with values
    _make_states(optimizer, saved)
    runs = {key: run for key, run in _runs(optimizer).items() if key in saved}
    dcp.load(runs, storage_reader=reader, planner=_Load())
    if info["loss_scale"] and optimizer.loss_scale:
        optimizer.loss_scale.load_state_dict(info["loss_scale"])
    for group, options in zip(optimizer.param_groups, info["groups"], strict=True):
        group.update(options)
    optimizer.zero_grad()
    optimizer.publish()
    return step, info["extra"]


def steps(folder: Path | str) -> list[int]:
    """Steps of the complete checkpoints in `folder`, oldest first."""
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in Path(folder).glob("step-*")]
    return sorted(int(name[1]) for name in names if name)


def consolidated(folder: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """The whole model as a state dict of fp32 tensors, for `model.load_state_dict`: no process group, no engine."""
    path, _, info = _open(folder, step)
    runs = {}  # a tied parameter has several names and one entry
    for kind, key, shape, dtype in info["tensors"].values():
        numel = math.prod(shape)
        runs[f"{kind}/{key}"] = Run(torch.empty(numel, dtype=dtype), 0, numel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist says
        dcp.load(dict(runs), storage_reader=dcp.FileSystemReader(path), planner=_Load(), no_dist=True)
    tensors = {
        name: runs[f"{kind}/{key}"].values.view(shape) for name, (kind, key, shape, _) in info["tensors"].items()
    }
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


# --- what there is to save ---


def _runs(optimizer: ZeroOptimizer) -> dict[str, Run]:
    """Masters with their optimizer states, frozen parameters and buffers of this rank. States that are numbers (Adam's
    step) are runs of one value."""
    found: dict[str, Run] = {}
    for segment in chain(*optimizer.masters.segments):
        for piece in segment.pieces:
            found[f"{_MASTER}/{piece.name}"] = _run(segment.values, piece)
            for key, value in optimizer.masters.inner.state[segment.values].items():
                if not isinstance(value, Tensor):
                    raise TypeError(f"optimizer state {key!r} is a {type(value).__name__}: only tensors are saved")
                if value.shape == segment.values.shape:
                    found[f"{_STATE}/{key}/{piece.name}"] = _run(value, piece)
                else:
                    found[f"{_NUMBER}/{key}/{piece.name}"] = Run(value.view(1), 0, 1)
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    for bucket in optimizer.all_buckets:
        for piece, values in bucket.sharded.frozen(names):
            if piece.numel:
                found[f"{_FROZEN}/{piece.name}"] = Run(values[: piece.numel].detach(), piece.start, piece.total)
    for name, buffer in _buffers(optimizer.model).items():
        found[f"{_BUFFER}/{name}"] = Run(buffer.view(-1), 0, buffer.numel())
    return found


def _run(values: Tensor, piece: Piece) -> Run:
    return Run(values.detach()[piece.offset :][: piece.numel], piece.start, piece.total)


def _buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.numel()}


def _info(optimizer: ZeroOptimizer, extra: dict[str, Any] | None) -> dict[str, Any]:
    """What is no tensor of the training state. `tensors`: kind, key, shape, dtype by name in a state dict."""
    model = optimizer.model
    first_name = {id(parameter): name for name, parameter in model.named_parameters()}
    tensors = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        kind = _MASTER if parameter.requires_grad else _FROZEN
        dtype = torch.float32 if parameter.requires_grad else optimizer.weight_dtype
        tensors[name] = (kind, first_name[id(parameter)], tuple(parameter.shape), dtype)
    for name, buffer in _buffers(model).items():
        tensors[name] = (_BUFFER, name, tuple(buffer.shape), buffer.dtype)
    return {
        "format": FORMAT,
        "tensors": tensors,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "loss_scale": optimizer.loss_scale.state_dict() if optimizer.loss_scale else None,
        "extra": extra or {},
    }


# --- what a checkpoint holds ---


def _make_states(optimizer: ZeroOptimizer, saved: Mapping[str, object]) -> None:
    """Replace the optimizer's states by memory for those that the checkpoint has of this rank's parameters."""
    kinds: dict[str, list[tuple[str, str, torch.dtype]]] = defaultdict(list)  # of a parameter: (kind, key, dtype)
    for entry_key, entry in saved.items():
        kind, _, rest = entry_key.partition("/")
        if kind in (_STATE, _NUMBER) and isinstance(entry, TensorStorageMetadata):
            key, _, name = rest.partition("/")
            kinds[name].append((kind, key, entry.properties.dtype))
    inner = optimizer.masters.inner
    for segment in chain(*optimizer.masters.segments):
        group, state = inner.param_groups[segment.group], inner.state[segment.values]
        state.clear()
        for kind, key, dtype in chain(*(kinds[piece.name] for piece in segment.pieces)):
            if key in state:
                continue
            if kind == _STATE:
                state[key] = torch.zeros_like(segment.values, dtype=dtype)
            else:  # the same for all parameters of a segment; on the CPU unless a kernel reads it
                device = segment.values.device if group.get("fused") or group.get("capturable") else "cpu"
                state[key] = torch.zeros((), dtype=dtype, device=device)


def _open(folder: Path | str, step: int | None) -> tuple[Path, int, dict[str, Any]]:
    """Path, step and info of the newest checkpoint, or of that of `step`."""
    found = steps(folder)
    if not found:
        raise CheckpointError(f"{folder} has no complete checkpoint (a folder step-<number>)")
    if step is not None and step not in found:
        raise CheckpointError(f"{folder} has no step {step}; complete are {', '.join(map(str, found))}")
    step = found[-1] if step is None else step
    path = Path(folder) / f"step-{step:08d}"
    info = torch.load(path / _INFO, weights_only=True)  # a checkpoint cannot run code
    if info.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {info.get('format')!r}, this version reads {FORMAT}")
    return path, step, info


def _check(path: Path, info: dict[str, Any], optimizer: ZeroOptimizer) -> None:
    """The checkpoint is of this model: same names, kinds and shapes, and as many parameter groups."""
    wanted, found = _info(optimizer, None)["tensors"], info["tensors"]
    for name in sorted(wanted.keys() ^ found.keys()):
        raise CheckpointError(f"{path}: {name} is in the {'model' if name in wanted else 'checkpoint'} only")
    for name in wanted:
        if wanted[name][:3] != found[name][:3]:
            raise CheckpointError(f"{path}: {name} is {found[name][:3]}, in the model {wanted[name][:3]}")
    if len(info["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{path} has {len(info['groups'])} parameter groups, the optimizer {len(optimizer.param_groups)}"
        )


# --- torch.distributed.checkpoint: which runs go where ---


class _Save(DefaultSavePlanner):
    """Writes `Run`s. Replicas that several ranks hold are written once, by the least busy."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values


class _Load(DefaultLoadPlanner):
    """Fills `Run`s from whatever runs were saved."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.flatten_state_dict = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values


def _sync(path: Path) -> None:
    """Make a new file, or a rename in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
