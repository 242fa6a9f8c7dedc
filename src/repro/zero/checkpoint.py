"""Save a training run under one plan and world size, and go on with it under another.

A rank's masters and moments are runs of values of parameters (`masters.Slice`), so a checkpoint is a set of flat
tensors, one per parameter and kind of state, of which every rank writes and reads its runs:
`torch.distributed.checkpoint` finds which files they are in. The 16-bit weights are not saved; they are made from the
masters.

    folder/step-00000100/        complete: it gets this name when all ranks have written
    folder/.step-00000200        being written; a killed run leaves it behind, and the next save removes it
"""

import os
import re
import shutil
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from repro.zero.engine import ZeroOptimizer
from repro.zero.masters import Slice

FORMAT = 1
_INFO = "info.pt"
# Kinds of tensors, the first part of a key such as "master/blocks.0.up.weight" or "state/exp_avg/blocks.0.up.weight".
_MASTER, _STATE, _NUMBER, _FROZEN, _BUFFER = "master", "state", "number", "frozen", "buffer"


class CheckpointError(ValueError):
    """There is no checkpoint, or it is of another model: the message names the folder and the parameter."""


@dataclass(frozen=True)
class Run:
    """A run of a flat tensor of `total` values, from `start` on: `values` is where they are in memory."""

    values: Tensor
    start: int
    total: int

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([self.start]), torch.Size([self.values.numel()]))


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
    runs = dict(_runs(optimizer)) | dict(_state_runs(optimizer))
    dcp.save(runs, storage_writer=dcp.FileSystemWriter(partial), planner=_Save())
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
    path, step = _find(folder, step)
    info = _read_info(path)
    _check(path, info, optimizer)
    state = _empty_state(path, optimizer)
    for master in optimizer.masters.flat:
        master.zero_()  # the padding between parameters: it shares quantisation blocks with values
    dcp.load(dict(_runs(optimizer)) | state.runs, storage_reader=dcp.FileSystemReader(path), planner=_Load())
    state.install()
    if info["loss_scale"] and optimizer.loss_scale:
        optimizer.loss_scale.load_state_dict(info["loss_scale"])
    for group, saved in zip(optimizer.param_groups, info["groups"], strict=True):
        group.update(saved)
    optimizer.zero_grad()
    optimizer.publish()
    return step, info["extra"]


def steps(folder: Path | str) -> list[int]:
    """Steps of the complete checkpoints in `folder`, oldest first."""
    names = [re.fullmatch(r"step-(\d+)", path.name) for path in Path(folder).glob("step-*")]
    return sorted(int(name[1]) for name in names if name)


def consolidated(folder: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """The whole model as a state dict of fp32 tensors, for `model.load_state_dict`: no process group, no engine."""
    path, _ = _find(folder, step)
    info = _read_info(path)
    found = {}
    for name, (kind, key, shape, dtype) in info["tensors"].items():
        numel = torch.Size(shape).numel()
        found[name] = (f"{kind}/{key}", Run(torch.empty(numel, dtype=dtype), 0, numel), shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what no_dist says
        runs = {key: run for key, run, _ in found.values()}
        dcp.load(runs, storage_reader=dcp.FileSystemReader(path), planner=_Load(), no_dist=True)
    # A tied parameter has several names and one entry.
    values = {key: run.values for key, run, _ in found.values()}
    tensors = {name: values[key].view(shape) for name, (key, _, shape) in found.items()}
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


# --- what there is to save ---


def _runs(optimizer: ZeroOptimizer) -> Iterator[tuple[str, Run]]:
    """Masters, frozen parameters and buffers of this rank."""
    sizes = {name: parameter.numel() for name, parameter in optimizer.model.named_parameters()}
    names = {id(parameter): name for name, parameter in optimizer.model.named_parameters()}
    for flat, slices in zip(optimizer.masters.flat, optimizer.masters.slices, strict=True):
        for piece in slices:
            values = flat[piece.offset : piece.offset + piece.numel]
            yield f"{_MASTER}/{piece.name}", Run(values, piece.start, sizes[piece.name])
    for bucket in optimizer.all_buckets:
        for part, values in bucket.sharded.frozen():
            if part.numel:
                name = names[id(part.param)]
                yield f"{_FROZEN}/{name}", Run(values[: part.numel], part.start, sizes[name])
    for name, buffer in _buffers(optimizer.model).items():
        yield f"{_BUFFER}/{name}", Run(buffer.view(-1), 0, buffer.numel())


def _buffers(model: torch.nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved and buffer.numel()}


def _state_runs(optimizer: ZeroOptimizer) -> Iterator[tuple[str, Run]]:
    """Optimizer states of this rank: tensors as runs like their masters, numbers (Adam's step) once per parameter."""
    masters = optimizer.masters
    sizes = {name: parameter.numel() for name, parameter in optimizer.model.named_parameters()}
    for number, slices in enumerate(masters.slices):
        for start, segment, _, state in masters.state(number):
            for piece in _inside(slices, start, segment.numel()):
                for key, value in state.items():
                    if not isinstance(value, Tensor):
                        raise TypeError(f"optimizer state {key!r} is a {type(value).__name__}: only tensors are saved")
                    if value.shape == segment.shape:
                        values = value[piece.offset - start :][: piece.numel]
                        yield f"{_STATE}/{key}/{piece.name}", Run(values, piece.start, sizes[piece.name])
                    else:
                        yield f"{_NUMBER}/{key}/{piece.name}", Run(value.view(1), 0, 1)


def _inside(slices: Sequence[Slice], start: int, numel: int) -> list[Slice]:
    return [piece for piece in slices if start <= piece.offset < start + numel]


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
        "plan": optimizer.plan.name,
        "world_size": optimizer.plan.topology.world_size,
        "tensors": tensors,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "loss_scale": optimizer.loss_scale.state_dict() if optimizer.loss_scale else None,
        "extra": extra or {},
    }


# --- what a checkpoint holds ---


@dataclass
class _State:
    """Optimizer state to be read: `pending` are the segments' new states, complete once `runs` have been filled."""

    runs: dict[str, Run]
    pending: list[tuple[dict[str, Any], dict[str, Tensor]]]  # (state of a segment, its new content)

    def install(self) -> None:
        for state, values in self.pending:
            state.clear()
            state.update(values)


def _empty_state(path: Path, optimizer: ZeroOptimizer) -> _State:
    """Memory for the states that the checkpoint has of this rank's parameters."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    kinds: dict[str, list[tuple[str, str, torch.dtype]]] = {}  # of a parameter: (number or state, its name, dtype)
    for key, entry in saved.items():
        kind, _, rest = key.partition("/")
        if kind in (_STATE, _NUMBER) and isinstance(entry, TensorStorageMetadata):
            name, _, parameter = rest.partition("/")
            kinds.setdefault(parameter, []).append((kind, name, entry.properties.dtype))
    state, masters = _State({}, []), optimizer.masters
    sizes = {name: parameter.numel() for name, parameter in optimizer.model.named_parameters()}
    for number, slices in enumerate(masters.slices):
        for start, segment, group, target in masters.state(number):
            values: dict[str, Tensor] = {}
            for piece in _inside(slices, start, segment.numel()):
                for kind, name, dtype in kinds.get(piece.name, []):
                    key = f"{kind}/{name}/{piece.name}"
                    if kind == _NUMBER:  # the same for all parameters of a segment; on the CPU unless a kernel reads it
                        device = segment.device if group.get("fused") or group.get("capturable") else "cpu"
                        value = values.setdefault(name, torch.zeros((), dtype=dtype, device=device))
                        state.runs[key] = Run(value.view(1), 0, 1)
                    else:
                        value = values.setdefault(name, torch.zeros_like(segment, dtype=dtype))
                        part = value[piece.offset - start :][: piece.numel]
                        state.runs[key] = Run(part, piece.start, sizes[piece.name])
            state.pending.append((target, values))
    return state


def _find(folder: Path | str, step: int | None) -> tuple[Path, int]:
    found = steps(folder)
    if not found:
        raise CheckpointError(f"{folder} has no complete checkpoint (a folder step-<number>)")
    if step is not None and step not in found:
        raise CheckpointError(f"{folder} has no step {step}; complete are {', '.join(map(str, found))}")
    step = found[-1] if step is None else step
    return Path(folder) / f"step-{step:08d}", step


def _read_info(path: Path) -> dict[str, Any]:
    info = torch.load(path / _INFO, weights_only=True)  # a checkpoint cannot run code
    if info.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {info.get('format')!r}, this version reads {FORMAT}")
    return info


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

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(key, run) for key, run in self.state_dict.items()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.state_dict[write_item.index.fqn].values.detach()


def _write_item(key: str, run: Run) -> WriteItem:
    data = TensorWriteData(run.chunk, TensorProperties.create_from_tensor(run.values), torch.Size([run.total]))
    return WriteItem(MetadataIndex(key, run.chunk.offsets), WriteItemType.SHARD, tensor_data=data)


class _Load(DefaultLoadPlanner):
    """Fills `Run`s from whatever runs were saved."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "a checkpoint is read with its metadata"
        items: list[ReadItem] = []
        for key, run in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), f"{key} is no tensor"
            items += create_read_items_for_chunk_list(key, saved, [run.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].values.detach()


def _sync(path: Path) -> None:
    """Make a new file, or a rename in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
