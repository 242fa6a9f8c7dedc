"""A small model with everything that a checkpoint can hold, its checkpoints, and how they are damaged."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attack.fuzz import Parser
from torch import nn

from repro.topology import frontier
from repro.zero import LossScale, ZeroOptimizer, checkpoint
from repro.zero import plan as plans
from repro.zero.checkpoint_files import CHECKSUM, INDEX, CheckpointError, checksum_line, read_index

NEWEST = "step-00000002"
FILES = (INDEX, CHECKSUM, "rank-00000.bin", "rank-00001.bin")
Damage = Callable[[Path], object]  # to the folder of a checkpoint
EXTRA = {"a": torch.tensor([1.0, float("nan"), 3.0]), "note": "two", "betas": (0.9, 0.95)}


class Tiny(nn.Module):
    """Two layers, a frozen bias, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 2)])
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("seen", torch.ones(3))
        self.register_buffer("count", torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x).tanh())


def build(world: int, cls: type = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    """In float16, with a loss scale and two parameter groups."""
    torch.manual_seed(0)
    model = Tiny()
    groups = [{"params": [block.weight for block in model.blocks]}, {"params": [model.blocks[1].bias], "lr": 1e-3}]
    plan = plans.named("zero3", frontier(1, 1, world))
    options = {"loss_scale": LossScale(8.0), "lr": 1e-2} | options
    return model, ZeroOptimizer(model, plan, cls, groups, weight_dtype=torch.float16, **options)


def backward(model: nn.Module, number: int) -> float:
    """The loss of a batch, which is another one for each number and rank."""
    torch.manual_seed(10 * number + dist.get_rank())
    loss = model(torch.randn(2, 4)).square().sum()
    loss.backward()
    return loss.item()


def train(model: nn.Module, optimizer: ZeroOptimizer, numbers: Sequence[int]) -> list[float]:
    """Losses and gradient norms."""
    return [value for number in numbers for value in (backward(model, number), optimizer.step())]


def save_two(rank: int, world: int, folder: Path) -> None:
    """Steps 1 and 2."""
    model, optimizer = build(world)
    for step in (1, 2):
        train(model, optimizer, [step])
        checkpoint.save(folder, step, optimizer, EXTRA)


def fingerprint(optimizer: ZeroOptimizer) -> str:
    """Of all that a load may change on this rank."""
    tensors = [*optimizer.masters.flat, *(bucket.gradient for bucket in optimizer.buckets)]
    tensors += [value for state in optimizer.masters.inner.state.values() for value in state.values()]
    tensors += [parameter.to_local() for parameter in optimizer.model.parameters()]
    tensors += list(optimizer.model.buffers())
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    found = pickle.dumps([tensor if tensor is None else tensor.detach().tolist() for tensor in tensors])
    return hashlib.sha256(found + repr((options, optimizer.loss_scale.state_dict())).encode()).hexdigest()


def alone(work: Callable[[], Any], folder: Path) -> int:
    """Run `work` in a process of its own, the only rank of a group; its wait status. An error's text is in `folder`."""
    child = os.fork()
    if not child:
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            work()
            os._exit(0)
        except BaseException as error:
            (folder / "error").write_text(repr(error))
            os._exit(1)
    return os.waitpid(child, 0)[1]


def read_all(folder: Path) -> None:
    """Every value of a checkpoint, and all that is no tensor."""
    index = read_index(folder)
    for key, entry in index.entries.items():
        index.tensor(key, [entry.numel])
    for name in index.info_as_json:
        index.info(name)


# --- fuzzing: the index, with its right checksum ---


def _seeds(folder: Path) -> list[Path]:
    def save() -> None:
        model, optimizer = build(1)
        train(model, optimizer, [1])
        checkpoint.save(folder, 1, optimizer, EXTRA)

    assert alone(save, folder) == 0, (folder / "error").read_text()
    return [Path(shutil.copy(folder / "step-00000001" / INDEX, folder / "seed.json"))]


def _parse(path: Path) -> None:
    sealed(path.read_bytes())(path.parent / "step-00000001")
    checkpoint.consolidated(path.parent, 1)
    read_all(path.parent / "step-00000001")


PARSER = Parser(_seeds, _parse, (CheckpointError,))


# --- damage ---


def sealed(text: bytes) -> Damage:
    """Another index, with its checksum."""

    def damage(folder: Path) -> None:
        (folder / INDEX).write_bytes(text)
        (folder / CHECKSUM).write_bytes(checksum_line(text))

    return damage


def edited(change: Callable[[Any], object]) -> Damage:
    """The index after a change, with its checksum."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        sealed(json.dumps(index).encode())(folder)

    return damage


def put(*path: Any, to: Any) -> Damage:
    """Replace a value of the index; its checksum is then right."""
    return edited(lambda index: _inner(index, path).__setitem__(path[-1], to))


def drop(*path: Any) -> Damage:
    """Remove a value of the index."""
    return edited(lambda index: _inner(index, path).__delitem__(path[-1]))


def _inner(index: Any, path: Sequence[Any]) -> Any:
    for name in path[:-1]:
        index = index[name]
    return index


def move(key: str, to: str) -> Damage:
    """Rename an entry of the index."""
    return edited(lambda index: index["tensors"].__setitem__(to, index["tensors"].pop(key)))


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """A file with other bytes."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(name: str, share: float) -> Damage:
    """One bit of the byte at a share of a file."""

    def change(data: bytes) -> bytes:
        place = int(share * (len(data) - 1))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return rewrite(name, change)


def nan_master(folder: Path) -> None:
    """A master that is NaN, with the right checksums."""
    chunk = read_index(folder).entries["master/blocks.0.weight"].chunks[0]
    path = folder / f"rank-{chunk.rank:05d}.bin"
    data = bytearray(path.read_bytes())
    data[chunk.offset : chunk.offset + 4] = b"\x00\x00\xc0\x7f"
    path.write_bytes(data)
    digest = hashlib.sha256(data[chunk.offset : chunk.offset + 4 * chunk.numel]).hexdigest()
    put("tensors", "master/blocks.0.weight", "chunks", 0, 4, to=digest)(folder)


class Evil:
    """Makes a file `ran` in a folder when its pickle is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.folder / "ran",))


def with_pickles(folder: Path) -> None:
    """The files of format 1, which run code."""
    for name in (".metadata", "info.pt", "__0_0.distcp"):
        (folder / name).write_bytes(pickle.dumps(Evil(folder)))


def format_1(folder: Path) -> None:
    """Nothing but these."""
    for name in FILES:
        (folder / name).unlink()
    with_pickles(folder)
