"""Checkpoints that were damaged, exchanged or made by somebody else: refused by every rank, which goes on as if it had
not been asked; and nothing in them runs."""

import errno
import itertools
import json
import os
import pickle
import random
import shutil
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attack import checkpoint_samples as samples
from attack.checkpoint_samples import FILES, NEWEST, Damage, drop, edited, flip, move, put, rewrite, sealed
from attack.promises import make_socket, refuses

from repro.launch import launch
from repro.zero import ZeroOptimizer, checkpoint, checkpoint_files
from repro.zero.checkpoint_files import CHECKSUM, INDEX, CheckpointError

MASTER, MOMENT, STEP = "master/blocks.0.weight", "state/exp_avg/blocks.0.weight", "number/step/blocks.0.weight"
Rows = dict[str, tuple[Damage, tuple[str, ...]]]  # by what is wrong: the damage, and words that the message has


# --- what can be wrong ---


def _instead(name: str, make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).rename(folder.parent / f"moved-{name}")
        make(folder / name)

    return damage


def _exchange(one: str, other: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / one).rename(folder.parent / "aside")
        (folder / other).rename(folder / one)
        (folder.parent / "aside").rename(folder / other)

    return damage


def _of_the_other_step(*names: str) -> Damage:
    return lambda folder: [shutil.copy(folder.parent / "step-00000001" / name, folder / name) for name in names]


def _file_rows() -> Rows:
    rows: Rows = {}
    shares = {
        "first byte": 0.0,
        "byte at a fifth": 0.2,
        "byte in the middle": 0.5,
        "byte at 0.8": 0.8,
        "last byte": 1.0,
    }
    kinds: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: None,
        "a link to the file": lambda path: path.symlink_to(path.parent.parent / f"moved-{path.name}"),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a pipe": os.mkfifo,
        "a socket": make_socket,
        "a folder": Path.mkdir,
    }
    if os.geteuid() == 0:
        kinds["a device"] = lambda path: os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
    for name in FILES:
        says = (NEWEST, name)
        checksum = (*says, "damaged")
        for where, share in shares.items():
            rows[f"{name}: a bit of the {where}"] = (flip(name, share), checksum)
        rows[f"{name}: its last byte is missing"] = (rewrite(name, lambda data: data[:-1]), says)
        rows[f"{name}: half of it is missing"] = (rewrite(name, lambda data: data[: len(data) // 2]), says)
        rows[f"{name}: empty"] = (rewrite(name, lambda data: b""), says)
        rows[f"{name}: a byte more"] = (rewrite(name, lambda data: data + b"\n"), says)
        rows[f"{name}: zeros"] = (rewrite(name, lambda data: bytes(len(data))), says)
        rows[f"{name}: 10 TB, most of it a hole"] = (lambda folder, name=name: os.truncate(folder / name, 10**13), says)
        for what, make in kinds.items():
            rows[f"{name}: {what}"] = (_instead(name, make), (*says, "no ordinary file"))
    return rows


EXCHANGES: Rows = {
    "two ranks' files exchanged": (_exchange("rank-00000.bin", "rank-00001.bin"), ("rank-0000",)),
    "rank 1's file of the step before": (_of_the_other_step("rank-00001.bin"), ("rank-00001.bin", "values", "another")),
    "all ranks' files of the step before": (_of_the_other_step("rank-00000.bin", "rank-00001.bin"), ("rank-0000",)),
    "the index of the step before": (_of_the_other_step(INDEX), (INDEX, CHECKSUM, "damaged")),
    "the step before under this name": (_of_the_other_step(*FILES), (INDEX, "is of step 1")),
    "format 1, whose files run code": (samples.format_1, (NEWEST, "format 1", "reads 2")),
}

_KEYS = (("format",), ("step",), ("info",), ("tensors",), ("tensors", MASTER), ("info", "tensors"), ("info", "groups"))
_OTHERS = {"null": None, "a string": "a", "a fraction": 0.5, "true": True, "a list": [[]], "a list of numbers": [1]}


def _index_rows() -> Rows:
    texts = {
        "empty": b"",
        "null": b"null",
        "a list": b"[]",
        "a string": b'"index"',
        "cut": b'{"format": 2, "step":',
        "NUL bytes": bytes(100),
        "no UTF-8": b'{"\xff": 1}',
        "NaN": b'{"format": NaN}',
        "Infinity": b'{"format": -Infinity}',
        "100,000 brackets": b"[" * 100_000,
        "100,000 objects": b'{"a":' * 100_000,
        "a number of 5,000 digits": b'{"format": ' + b"1" * 5000 + b"}",
        "a key twice": b'{"format": 2, "format": 2}',
        "another language": b"<checkpoint/>",
        "a pickle": pickle.dumps({"format": 2}),
    }
    rows = {f"index: {what}": (sealed(text), (INDEX,)) for what, text in texts.items()}
    for path in _KEYS:
        where = "/".join(path)
        rows[f"index: no {where}"] = (drop(*path), (NEWEST,))
        for what, other in _OTHERS.items():
            rows[f"index: {where} is {what}"] = (put(*path, to=other), (NEWEST, "allowed" if len(path) == 1 else ""))
    for version in (0, 1, 3, 10**30):
        rows[f"index: format {version}"] = (put("format", to=version), (INDEX, f"format {version}", "reads 2"))
    for step in (-1, 1, 3, 10**12, 10**4000):
        rows[f"index: step {step if step < 10**13 else 'of 4,001 digits'}"] = (put("step", to=step), (INDEX, "of step"))
    return rows


def _same_bytes(index: dict) -> None:
    index["tensors"][MASTER]["chunks"][0][2:] = index["tensors"][MOMENT]["chunks"][0][2:]


def _entry_rows() -> Rows:
    rows: Rows = {}
    for field, others in {
        "dtype": ("float33", "", "object", "__class__", "qint8", None, 4, ["float32"]),
        "numel": (0, -1, 11, 10**12, 2**63, 10**4000, 1.5, "12", True, None),
        "chunks": ([], None, {}, "ab", [[]], [None], [[0, 12, 0]], [{}]),
    }.items():
        rows[f"entry: no {field}"] = (drop("tensors", MASTER, field), (INDEX, field))
        for other in others:
            damage = put("tensors", MASTER, field, to=other)
            rows[f"entry: {field} is {json.dumps(other)[:20]}"] = (damage, (INDEX,))
    for position, field in enumerate(("start", "numel", "rank", "offset", "sha256")):
        for other in (-1, 1, 10**12, 2**63, 10**4000, "a", 0.0, True, None, [0]):
            damage = put("tensors", MASTER, "chunks", 0, position, to=other)
            rows[f"chunk: {field} is {json.dumps(other)[:20]}"] = (
                damage,
                (NEWEST,) if field in ("rank", "offset") else (MASTER,),
            )

    def chunks(change: Callable[[list], list]) -> Damage:
        def edit(index: dict) -> None:
            index["tensors"][MASTER]["chunks"] = change(index["tensors"][MASTER]["chunks"])

        return edited(edit)

    return rows | {
        "chunks: the first is missing": (chunks(lambda found: found[1:]), (MASTER, "allowed: 0")),
        "chunks: the last is missing": (chunks(lambda found: found[:-1]), (MASTER, "allowed: 12, all")),
        "chunks: one twice": (chunks(lambda found: [found[0], *found]), (MASTER, "allowed")),
        "chunks: the other way round": (chunks(lambda found: found[::-1]), (MASTER, "allowed: 0")),
        "chunks: of another tensor's bytes": (
            edited(_same_bytes),
            ("at byte", "allowed"),
        ),
        "chunks: a path": (put("tensors", MASTER, "chunks", 0, 2, to="../../secret"), (MASTER,)),
    }


def _no_model_rows() -> Rows:
    """Right as a checkpoint, of another model: `consolidated` has no model to compare with."""

    group = ("info", "groups", 0)
    rows = {
        "no entry of a frozen parameter": (
            move("frozen/blocks.0.bias", "info/7"),
            ("frozen/blocks.0.bias is in no file",),
        ),
        "no entry of a buffer": (move("buffer/seen", "info/7"), ("buffer/seen is in no file",)),
        "an entry of no tensor": (move("info/0", "master/blocks.9.weight"), ("master/blocks.9.weight is of no",)),
        "an entry of no kind": (move("info/0", "code/blocks.0.weight"), ("code/blocks.0.weight is of no",)),
        "a state of no parameter": (move(MOMENT, "state/exp_avg/seen"), ("state/exp_avg/seen is of no",)),
        "a state of a frozen parameter": (
            move(MOMENT, "state/exp_avg/blocks.0.bias"),
            ("exp_avg/blocks.0.bias is of no",),
        ),
        "a state without a name": (move(MOMENT, "state"), ("state is of no",)),
        "a moment less": (move(MOMENT, "info/7"), ("blocks.0.weight has", "exp_avg_sq")),
        "a step counter less": (move(STEP, "info/7"), ("blocks.0.weight has",)),
        "a number of many values": (move(MOMENT, "number/exp_avg/blocks.0.weight"), ("has 12 values, in the model 1",)),
        "masters of integers": (put("tensors", MASTER, "dtype", to="int32"), (MASTER, "int32", "float32")),
        "moments of integers": (put("tensors", MOMENT, "dtype", to="int32"), ("blocks.0.weight", "int32", "float32")),
        "a buffer of integers": (
            put("tensors", "buffer/seen", "dtype", to="int32"),
            ("buffer/seen", "int32", "float32"),
        ),
        "a counter of fractions": (put("tensors", "buffer/count", "dtype", to="float64"), ("buffer/count", "float64")),
        "a parameter less": (drop("info", "tensors", "blocks.1.weight"), ("blocks.1.weight is in the model only",)),
        "a parameter more": (
            put("info", "tensors", "more", to=["master", "more", [1], 0]),
            ("more is in the checkpoint only",),
        ),
        "a parameter without a group": (
            put("info", "tensors", "blocks.0.weight", 3, to=None),
            ("blocks.0.weight", "None"),
        ),
        "a parameter of another group": (put("info", "tensors", "blocks.0.weight", 3, to=1), ("blocks.0.weight", "1]")),
        "another optimizer": (put("info", "optimizer", to="SGD"), ("SGD", "AdamW")),
        "no optimizer": (drop("info", "optimizer"), ("optimizer",)),
        "a group less": (
            edited(lambda index: index["info"]["groups"].pop()),
            ("has 1 parameter groups, the optimizer 2",),
        ),
        "a group more": (edited(lambda index: index["info"]["groups"].append({})), ("3 parameter groups",)),
        "a group that is none": (put(*group, to=["lr"]), ("parameter group 0", "allowed")),
        "options that have parameters": (put(*group, "params", to=[]), ("parameter group 0", "params")),
        "no extra": (drop("info", "extra"), ("extra",)),
        "extra is a list": (put("info", "extra", to=[1]), ("extra", "allowed: a dict")),
    }
    for option, others in {
        "lr": ("a", True, [0.1], {"$tensor": [0, [3]]}),
        "betas": (0.9, [0.9, 0.9], {"$tuple": [1]}),
    }.items():
        for other in others:
            damage = put(*group, option, to=other)
            rows[f"option {option} is {json.dumps(other)}"] = (
                damage,
                (f"'{option}' of parameter group 0", "in the optimizer"),
            )
    for field, others in {"value": ("nan", "inf", "-inf"), "good_steps": ("nan",), "skipped": ("-inf",)}.items():
        for other in others:
            damage = put("info", "loss_scale", field, to={"$float": other})
            rows[f"loss scale: {field} is {other}"] = (damage, ("loss_scale", other, field))
    for field, others in {
        "value": (0, -1.0, "a", None, True, [1]),
        "good_steps": (-1, "a"),
        "skipped": (-1, None),
    }.items():
        for other in others:
            damage = put("info", "loss_scale", field, to=other)
            rows[f"loss scale: {field} is {json.dumps(other)}"] = (damage, ("loss_scale", field))
    for what in ("value", "good_steps", "skipped"):
        rows[f"loss scale: no {what}"] = (drop("info", "loss_scale", what), ("loss_scale", what))
    for what, other in {
        "an unknown tag": {"$code": "print()"},
        "a tensor of nothing": {"$tensor": [99, [1]]},
        "a tensor of 10^12 values": {"$tensor": [0, [10**12]]},
        "a tensor of 2^70 values": {"$tensor": [0, [2**70]]},
        "a tensor of a negative size": {"$tensor": [0, [-1, -3]]},
        "a tensor of no shape": {"$tensor": [0, 3]},
        "a tensor of no key": {"$tensor": [[0], [3]]},
        "a tensor of three": {"$tensor": [0, [3], 1]},
        "a float of letters": {"$float": "abc"},
        "a float of a list": {"$float": []},
        "a tuple of a number": {"$tuple": 3},
        "a set of lists": {"$set": [[]]},
        "a dict of numbers": {"$dict": [1, 2]},
        "a dict of lists as keys": {"$dict": [[[], 1]]},
        "a Counter of a string": {"$Counter": "a"},
    }.items():
        rows[f"extra: {what}"] = (put("info", "extra", "a", to=other), (INDEX,))
    return rows


FILE_ROWS = _file_rows() | EXCHANGES
REFUSED = FILE_ROWS | _index_rows() | _entry_rows() | _no_model_rows()
HARMLESS: dict[str, Damage] = {
    "a file of somebody else": lambda folder: (folder / "notes.txt").write_text("mine"),
    "a rank's file of a larger world": lambda folder: shutil.copy(folder / "rank-00001.bin", folder / "rank-00007.bin"),
    "pickles that run code": samples.with_pickles,
    "a NaN in a master": samples.nan_master,
    "an option of a schedule": put("info", "groups", 0, "initial_lr", to=0.5),
    "an option less": drop("info", "groups", 0, "foreach"),
    "no loss scale": put("info", "loss_scale", to=None),
}


# --- loads: both ranks of a run that is under way try every checkpoint ---


def _cannot_open(patch: pytest.MonkeyPatch, code: int, mode: str) -> None:
    """Files of ranks cannot be opened to read ("r") or write ("x")."""

    def opening(path: Path, how: str, **options: Any) -> Any:
        if Path(path).suffix == ".bin" and mode in how:
            raise OSError(code, os.strerror(code))
        return open(path, how, **options)

    patch.setattr(checkpoint_files, "open", opening, raising=False)


def _no_memory(*args: Any, **options: Any) -> None:
    raise MemoryError("no memory")


# What is wrong on rank 1 alone: what is replaced there, what rank 0 says.
ON_RANK_1: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], str]] = {
    "an error while reading": (lambda patch: _cannot_open(patch, errno.EIO, "r"), "rank 1: CheckpointError: "),
    "no permission": (lambda patch: _cannot_open(patch, errno.EACCES, "r"), "Permission denied"),
    "no memory": (lambda patch: patch.setattr(torch, "zeros_like", _no_memory), "rank 1: MemoryError: no memory"),
    "no checkpoint": (lambda patch: patch.setattr(checkpoint, "steps", lambda folder: []), "no complete checkpoint"),
    "another checkpoint": (lambda patch: patch.setattr(checkpoint, "steps", lambda folder: [1]), "see different"),
}


def _attempt(action: Callable[[], object]) -> tuple[str, str]:
    """Class and text of what it raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _loads(rank: int, world: int, folders: dict[str, Path]) -> dict[str, Any]:
    """Class and text of what each load raises, and whether all is as before. Of a twin, which loads nothing, and of
    this run: how training goes on."""
    runs = samples.build(world), samples.build(world)
    for model, optimizer in runs:
        samples.train(model, optimizer, [7])
        samples.backward(model, 8)
        optimizer.held_bytes()  # waits for the gradients
    optimizer = runs[0][1]
    before = samples.fingerprint(optimizer)
    found: dict[str, Any] = {}
    for what, folder in folders.items():
        if what not in HARMLESS:
            error = _attempt(lambda folder=folder: checkpoint.load(folder, optimizer))
            found[what] = (*error, samples.fingerprint(optimizer) == before)
    for what, (prepare, _) in ON_RANK_1.items():
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                prepare(patch)
            error = _attempt(lambda: checkpoint.load(folders["a file of somebody else"], optimizer))
        found[what] = (*error, samples.fingerprint(optimizer) == before)
    found["training"] = [samples.train(*run, [9, 10]) for run in runs]
    for what in HARMLESS:
        error = _attempt(lambda what=what: checkpoint.load(folders[what], optimizer))
        steps = optimizer.masters.inner.state_dict()["state"][0]["step"]
        found[what] = (*error, steps.item())
        steps.zero_()  # else the next load would have nothing to do
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with two checkpoints for each row, the newest damaged."""
    root = tmp_path_factory.mktemp("checkpoints")
    launch(samples.save_two, 2, root / "good", timeout_s=60)
    damages = {what: damage for what, (damage, _) in REFUSED.items()} | HARMLESS
    made = {what: root / str(number) for number, what in enumerate(damages)}
    for what, folder in made.items():
        shutil.copytree(root / "good", folder)
        damages[what](folder / NEWEST)
    return made


@pytest.fixture(scope="module")
def loaded(folders: dict[str, Path]) -> list[dict[str, Any]]:
    return launch(_loads, 2, folders, timeout_s=100)


@pytest.mark.parametrize("what", REFUSED)
def test_every_rank_refuses_to_load(loaded, what):
    for rank in loaded:
        error, message, as_before = rank[what]
        assert error == "CheckpointError" and as_before, message
        assert not [word for word in REFUSED[what][1] if word not in message], message
    assert len(message) < 20_000


@pytest.mark.parametrize("what", ON_RANK_1)
def test_what_one_rank_cannot_load_no_rank_loads(loaded, what):
    error, message, as_before = loaded[0][what]
    assert error == "CheckpointError" and ON_RANK_1[what][1] in message and as_before
    error, message, as_before = loaded[1][what]
    assert error == ("MemoryError" if what == "no memory" else "CheckpointError") and as_before


def test_training_goes_on_as_if_no_load_had_been_tried(loaded):
    for rank in loaded:
        tried, twin = rank["training"]
        assert tried == twin


@pytest.mark.parametrize("what", HARMLESS)
def test_what_does_no_harm_is_loaded(loaded, folders, what):
    for rank in loaded:
        assert rank[what] == ("", "", 2.0)
    assert not (folders[what] / NEWEST / "ran").exists()


def test_nothing_ran(loaded, folders):
    """The pickles are such that would."""
    folder = folders["format 1, whose files run code"] / NEWEST
    assert not (folder / "ran").exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert (folder / "ran").exists()


def test_consolidated_refuses_or_has_the_weights(folders):
    """It has no model to compare an index with; damaged files never pass."""
    wanted = checkpoint.consolidated(folders["a file of somebody else"])
    for what in REFUSED:
        try:
            found = checkpoint.consolidated(folders[what])
        except CheckpointError as error:
            assert str(folders[what]) in str(error), what
        else:
            same = found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
            assert same or what not in FILE_ROWS, what


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_a_byte_is_named(folders, name, tmp_path):
    folder = shutil.copytree(folders["a file of somebody else"] / NEWEST, tmp_path / NEWEST)
    whole = (folder / name).read_bytes()
    for place in range(0, len(whole), 1 + len(whole) // 300):
        (folder / name).write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])

        refuses(lambda: samples.read_all(folder), CheckpointError, name)


# --- which folders are checkpoints ---

NAMES = {
    "step-00000001": 1,
    "step-00000000": 0,
    "step-123456789": 123456789,
    "step-7": None,
    "step-000000007": None,
    "step-0000000a": None,
    "step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661": None,
    "step-00000001\n": None,
    "step-00000001.bak": None,
    "step--0000001": None,
    "step-" + "9" * 30: None,
    "Step-00000001": None,
    ".step-00000001": None,
    "mystep-00000001": None,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_checkpoint_is_a_folder_of_its_name(name, kind, tmp_path):
    made = tmp_path / "run" / name
    made.parent.mkdir()
    (tmp_path / "elsewhere").mkdir()
    {"folder": made.mkdir, "file": made.touch, "link": lambda: made.symlink_to(tmp_path / "elsewhere")}[kind]()
    step = NAMES[name] if kind == "folder" else None
    assert checkpoint.steps(tmp_path / "run") == ([] if step is None else [step])
    wanted = "no complete checkpoint" if step is None else "index.json"
    refuses(lambda: checkpoint.consolidated(tmp_path / "run"), CheckpointError, wanted)


@pytest.mark.parametrize(
    "step", [True, -1, "1", 1.0, 2**63, [1], (1,), 10**400, float("nan"), np.int64(1), b"1"], ids=repr
)
def test_a_step_is_a_whole_number(folders, step):
    refuses(lambda: checkpoint.consolidated(folders["a file of somebody else"], step), ValueError, "step is", "allowed")


@pytest.mark.parametrize(
    "make", [Path.touch, lambda path: None, lambda path: path.symlink_to("nothing")], ids=["file", "nothing", "link"]
)
def test_no_folder_at_all(tmp_path, make):
    make(tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == []
    refuses(lambda: checkpoint.consolidated(tmp_path / "run"), CheckpointError, "run has no complete checkpoint")


# --- saves ---

INF = float("inf")
KEPT: dict[str, Any] = {
    "nothing": {},
    "None": {"a": None},
    "bool": {"a": True, "b": False},
    "int": {"a": -(2**70)},
    "float": {"a": 0.1, "b": 5e-324, "c": 1.7976931348623157e308, "d": -0.0},
    "infinity": {"a": INF, "b": -INF, "c": float("nan")},
    "text": {"a": "\x00\n\u2028 \ud800 \U0001f642", "": "no name"},
    "list": {"a": [1, [2.0, None], []]},
    "tuple": {"a": (1, (2, ()), [3])},
    "set": {"a": {1, "b", (2, 3)}, "b": set()},
    "dict": {"a": {"b": {"c": 1}}},
    "keys": {1: "int", 2.5: "float", None: "None", False: "no", (1, 2): "tuple", "1": "text", INF: "inf"},
    "names like our tags": {"$tuple": [1], "a": {"$tensor": [0, [1]]}, "b": {"$float": "inf", "c": 1}, "$": 2},
    "Counter": {"a": Counter({2: 1, 5: 3})},
    "OrderedDict": {"a": OrderedDict(z=1, a=2)},
    "tensor": {"a": torch.arange(6.0).view(2, 3)},
    "tensors of every dtype": {name: torch.ones(3).to(dtype) for name, dtype in checkpoint_files.DTYPES.items()},
    "a number's tensor": {"a": torch.tensor(7)},
    "an empty tensor": {"a": torch.empty(0, 3)},
    "a transposed tensor": {"a": torch.arange(6).view(2, 3).t()},
    "a part of a tensor": {"a": torch.arange(10)[2:8:2]},
    "an expanded tensor": {"a": torch.tensor([1.0]).expand(5)},
    "a tensor twice": {"a": [torch.ones(2)] * 2},
    "a parameter": {"a": torch.nn.Parameter(torch.ones(2))},
    "a tensor of more than one chunk": {"a": torch.arange(1_500_000)},
    "the state of a generator": {"a": torch.Generator().manual_seed(3).get_state()},
    "the state of a schedule": torch.optim.lr_scheduler.MultiStepLR(
        torch.optim.SGD([torch.ones(1)], 0.1), [2, 4]
    ).state_dict(),
    "150 lists": {"a": json.loads("[" * 150 + "]" * 150)},
}
_ring: list = []
_ring.append(_ring)
NOT_KEPT: dict[str, tuple[Any, str, str]] = {
    "an object": ({"a": object()}, "TypeError", "extra['a'] is a object"),
    "inside": ({"a": [1, {"b": (object(),)}]}, "TypeError", "extra['a'][1]['b'][0] is a object"),
    "as a key": ({"a": {object(): 1}}, "TypeError", "a key of extra['a'] is a object"),
    "bytes": ({"a": b"x"}, "TypeError", "extra['a'] is a bytes"),
    "a complex number": ({"a": 1j}, "TypeError", "extra['a'] is a complex"),
    "a function": ({"a": print}, "TypeError", "extra['a'] is a builtin_function"),
    "a path": ({"a": Path("x")}, "TypeError", "extra['a'] is a PosixPath"),
    "a dtype": ({"a": torch.float32}, "TypeError", "extra['a'] is a dtype"),
    "a module": ({"a": torch.nn.Linear(1, 1)}, "TypeError", "extra['a'] is a Linear"),
    "an array": ({"a": np.ones(2)}, "TypeError", "extra['a'] is a ndarray"),
    "a number of numpy": ({"a": np.float32(1)}, "TypeError", "extra['a'] is a float32"),
    "a frozenset": ({"a": frozenset()}, "TypeError", "extra['a'] is a frozenset"),
    "a sparse tensor": ({"a": torch.eye(2).to_sparse()}, "TypeError", "extra['a'] is a Tensor"),
    "a tensor on the meta device": ({"a": torch.ones(2, device="meta")}, "TypeError", "extra['a'] is a Tensor"),
    "a list that has itself": ({"a": _ring}, "RecursionError", "recursion"),
    "900 lists": ({"a": json.loads("[" * 900 + "]" * 900)}, "RecursionError", "recursion"),
    "a number of 5,000 digits": ({"a": 10**5000}, "ValueError", "digits"),
    "a list instead of a dict": ([1], "TypeError", "extra is a list, allowed: a dict"),
    "text instead of a dict": ("a", "TypeError", "extra is a str, allowed: a dict"),
}
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"step {step!r}": ({"step": step}, "step is")
        for step in (-1, True, False, "3", 3.0, None, 2**63, float("nan"), np.int64(3))
    },
    **{
        f"keep {keep!r}": ({"keep": keep}, "keep is")
        for keep in (0, -1, True, "2", 2.0, None, float("inf"), np.int64(2))
    },
}


def _saves(folder: Path) -> None:
    """What of an extra comes back, and what saves raise."""
    model, optimizer = samples.build(1)
    samples.train(model, optimizer, [1])
    found: dict[str, Any] = {}
    for number, (what, extra) in enumerate(KEPT.items()):
        checkpoint.save(folder / str(number), 1, optimizer, extra)
        found[what] = checkpoint.load(folder / str(number), optimizer)[1]
    for what, (extra, *_) in NOT_KEPT.items():
        found[what] = _attempt(lambda extra=extra: checkpoint.save(folder / "refused", 1, optimizer, extra))
        found[what] += (checkpoint.steps(folder / "refused"),)
    for what, (arguments, _) in ARGUMENTS.items():
        given = {"step": 1, **arguments}
        found[what] = _attempt(lambda given=given: checkpoint.save(folder / "arguments", optimizer=optimizer, **given))
        found[what] += ((folder / "arguments").exists(),)
    for what, (before, step, keep, _) in RETENTION.items():
        for other in before:
            checkpoint.save(folder / what, other, optimizer, keep=100)
        for name in FOREIGN:
            (folder / what / name).mkdir(parents=True)
        checkpoint.save(folder / what, step, optimizer, keep=keep)
        found[what] = checkpoint.steps(folder / what), [name for name in FOREIGN if (folder / what / name).is_dir()]
    for what, (cls, options) in OPTIMIZERS.items():
        losses = []
        for resumes in (False, True):
            model, optimizer = samples.build(1, cls, **options)
            if resumes:
                checkpoint.load(folder / what, optimizer)
            else:
                samples.train(model, optimizer, [1, 2])
                checkpoint.save(folder / what, 2, optimizer)
            losses.append(samples.train(model, optimizer, [3, 4]))
        found[what] = losses
    torch.save(found, folder / "found")


# Steps that are there, the step that is saved, how many are kept: steps that are there then.
RETENTION: dict[str, tuple[list[int], int, int, list[int]]] = {
    "the first": ([], 1, 1, [1]),
    "the last alone": ([1, 2, 3], 4, 1, [4]),
    "two": ([1, 2, 3], 4, 2, [3, 4]),
    "more than there are": ([1, 2], 4, 9, [1, 2, 4]),
    "in between": ([1, 2, 8, 9], 5, 2, [2, 5, 8, 9]),
    "before all": ([8, 9], 1, 1, [1, 8, 9]),
    "beyond eight digits": ([99_999_999], 100_000_000, 1, [100_000_000]),
    "step 0": ([], 0, 1, [0]),
}
FOREIGN = ("steps", "step-1", ".step-mine", ".step-00000001.bak", "step-00000001-good", ".git")


OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD with momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "Adam, fused": (torch.optim.Adam, {"fused": True}),
    "Adam, lr a tensor": (torch.optim.Adam, {"lr": torch.tensor(1e-2), "foreach": False}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("saves")
    assert samples.alone(lambda: _saves(folder), folder) == 0, (folder / "error").read_text()
    return torch.load(folder / "found", weights_only=False)


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        same_type = isinstance(found, Counter) == isinstance(wanted, Counter)
        return same_type and len(found) == len(wanted) and all(map(_same, found.items(), wanted.items()))
    if isinstance(wanted, list | tuple):
        return type(found) is type(wanted) and len(found) == len(wanted) and all(map(_same, found, wanted))
    return type(found) is type(wanted) and (found == wanted or repr(found) == repr(wanted) == "nan")


@pytest.mark.parametrize("what", KEPT)
def test_an_extra_comes_back_as_it_was(saved, what):
    assert _same(saved[what], KEPT[what]), saved[what]


@pytest.mark.parametrize("what", NOT_KEPT)
def test_an_extra_that_would_not_come_back_is_refused(saved, what):
    error, message, steps = saved[what]
    assert (error, steps) == (NOT_KEPT[what][1], []) and NOT_KEPT[what][2] in message, message


@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_are_whole_numbers_in_their_range(saved, what):
    error, message, touched = saved[what]
    assert error == "ValueError" and not touched
    assert ARGUMENTS[what][1] in message and "allowed: whole numbers from" in message


@pytest.mark.parametrize("what", RETENTION)
def test_what_a_save_removes(saved, what):
    assert saved[what] == (RETENTION[what][3], list(FOREIGN))


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit(saved, what):
    assert saved[what][0] == saved[what][1]


def test_an_index_is_json_without_infinity(tmp_path):
    """Not even for an option that is infinite."""
    folder = tmp_path / "run"

    def work() -> None:
        _, optimizer = samples.build(1)
        optimizer.param_groups[0]["limit"] = INF
        checkpoint.save(folder, 1, optimizer, {"a": -INF})

    assert samples.alone(work, tmp_path) == 0, (tmp_path / "error").read_text()
    text = (folder / "step-00000001" / INDEX).read_text()
    document = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} stands in it"))
    assert document["info"]["extra"] == {"a": {"$float": "-inf"}}


# --- saves that fail ---


def _one_rank_fails(rank: int, world: int, folder: Path) -> dict[str, Any]:
    model, optimizer = samples.build(world)
    samples.train(model, optimizer, [1])
    checkpoint.save(folder, 1, optimizer)
    found: dict[str, Any] = {}
    for what, (prepare, options, _) in SAVES_OF_RANK_1.items():
        with pytest.MonkeyPatch.context() as patch:
            given = {"step": 2}
            if rank == 1:
                prepare(patch)
                given |= options
            error = _attempt(lambda given=given: checkpoint.save(folder, optimizer=optimizer, **given))
        dist.barrier()
        found[what] = (*error, checkpoint.steps(folder))
    checkpoint.save(folder, 2, optimizer)
    found["then"] = sorted(path.name for path in folder.iterdir()), checkpoint.load(folder, optimizer)
    return found


def _odd_state(*args: Any) -> None:
    raise TypeError("a state that cannot be saved")


# What rank 1 meets or gives, and what rank 0 says of it.
SAVES_OF_RANK_1: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], dict[str, Any], str]] = {
    "a full disk": (lambda patch: _cannot_open(patch, errno.ENOSPC, "x"), {}, "rank 1: OSError: [Errno 28] No space"),
    "no permission": (lambda patch: _cannot_open(patch, errno.EACCES, "x"), {}, "rank 1: PermissionError"),
    "another step": (lambda patch: None, {"step": 3}, "rank 1: FileNotFoundError"),
    "a bad step": (lambda patch: None, {"step": -3}, "rank 1: ValueError: step is -3"),
    "a bad keep": (lambda patch: None, {"keep": 0}, "rank 1: ValueError: keep is 0"),
    "gradients": (
        lambda patch: patch.setattr(ZeroOptimizer, "has_gradients", True),
        {},
        "rank 1: RuntimeError: a checkpoint holds no gradients",
    ),
    "a state": (lambda patch: patch.setattr(checkpoint.checkpoint_state, "runs", _odd_state), {}, "rank 1: TypeError"),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(_one_rank_fails, 2, tmp_path_factory.mktemp("failing"), timeout_s=60)


@pytest.mark.parametrize("what", SAVES_OF_RANK_1)
def test_what_one_rank_cannot_save_no_rank_saves(failed, what):
    error, message, steps = failed[0][what]
    assert error == "CheckpointError" and SAVES_OF_RANK_1[what][2] in message and steps == [1], message
    assert failed[1][what][0] != "CheckpointError" and failed[1][what][2] == [1]


def test_the_next_save_works_and_clears(failed):
    for names, loaded in (rank["then"] for rank in failed):
        assert names == ["step-00000001", "step-00000002"] and loaded == (2, {})


# --- kills ---


def _killed_at(folder: Path, moment: int) -> None:
    """Killed at a number of the calls that make, write, rename or remove a file while saving step 3."""
    model, optimizer = samples.build(1)
    for step in (1, 2):
        samples.train(model, optimizer, [step])
        checkpoint.save(folder, step, optimizer)
    calls = itertools.count(1)

    def counted(genuine: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return genuine(*args, **options)

        return call

    checkpoint_files.open = counted(open)
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    checkpoint.save(folder, 3, optimizer)
    assert next(calls) <= moment, "the kill came to nothing"


def _saved_after(folder: Path) -> None:
    _, optimizer = samples.build(1)
    step, _ = checkpoint.load(folder, optimizer)
    checkpoint.save(folder, step + 1, optimizer, keep=1)


LAST = 19  # a call more than a save makes: this one kills nothing
OFTEN = (1, 4, 8, 12, 15, LAST)
MOMENTS = [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.exhaustive) for n in range(1, LAST + 1)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_call_loses_nothing_that_was_finished(tmp_path, moment):
    folder = tmp_path / "run"
    status = samples.alone(lambda: _killed_at(folder, moment), tmp_path)
    assert os.WIFSIGNALED(status) if moment < LAST else status == 0, (tmp_path / "error").read_text()
    assert checkpoint.steps(folder) in ([1, 2], [1, 2, 3], [2, 3])
    _nothing_is_lost(folder)


def _saving(folder: Path, seconds: float) -> None:
    """Saves until the alarm ends the process."""
    model, optimizer = samples.build(1)
    samples.train(model, optimizer, [1])
    checkpoint.save(folder, 0, optimizer)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process; the parent's handler was inherited
    signal.setitimer(signal.ITIMER_REAL, seconds)
    for step in itertools.count(1):
        checkpoint.save(folder, step, optimizer)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(8))
def test_a_kill_at_any_moment_loses_nothing_that_was_finished(tmp_path, seed):
    folder = tmp_path / "run"
    status = samples.alone(lambda: _saving(folder, random.Random(seed).uniform(0.001, 0.2)), tmp_path)
    assert os.WIFSIGNALED(status), (tmp_path / "error").read_text()
    _nothing_is_lost(folder)


def _nothing_is_lost(folder: Path) -> None:
    """All checkpoints can be read, the newest can be gone on from, and the next save clears what was left."""
    steps = checkpoint.steps(folder)
    for step in steps:
        samples.read_all(folder / f"step-{step:08d}")
    status = samples.alone(lambda: _saved_after(folder), folder.parent)
    assert status == 0, (folder.parent / "error").read_text()
    assert [path.name for path in folder.iterdir()] == [f"step-{steps[-1] + 1:08d}"]
