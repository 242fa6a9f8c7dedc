"""Checkpoints: go on under another plan and world size with the same losses, and survive a kill while being written."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ddp_reference import SHAPE, batch
from torch import nn

from repro.launch import RankError, launch
from repro.models.gpt import GPT
from repro.topology import Topology, frontier
from repro.zero import Plan, ZeroOptimizer, checkpoint
from repro.zero import plan as plans
from repro.zero.checkpoint_files import Entry, read_index

EIGHT, FOUR, TWO = frontier(2, 2, 2), frontier(2, 1, 2), frontier(1, 1, 2)
SHAPE = replace(SHAPE, tied=True)


def _build(plan: Plan, shape=SHAPE, seen=(2,), grouped=True, **options) -> tuple[nn.Module, ZeroOptimizer]:
    """Two parameter groups, tied embeddings, a frozen layer, a buffer."""
    torch.manual_seed(0)
    model = GPT(shape)
    model.blocks[0].up.requires_grad_(False)
    model.register_buffer("seen", torch.zeros(seen))
    matrices = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    groups = groups if grouped else [{"params": matrices + others}]
    settings = {"weight_dtype": torch.float32, "lr": 1e-2, "max_grad_norm": 0.4} | options
    return model, ZeroOptimizer(model, plan, torch.optim.AdamW, groups, **settings)


def _steps(model: nn.Module, optimizer: ZeroOptimizer, plan: Plan, steps: range) -> list[float]:
    """Losses over 8 sequences a step, whatever the number of ranks: a rank takes its share as micro-batches."""
    world, rank, losses = plan.topology.world_size, torch.distributed.get_rank(), []
    for step in steps:
        total, count = 0.0, 8 // world
        for micro_batch in range(count):
            loss = model(*batch(step, rank * count + micro_batch)) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        loss = torch.tensor(total) / world
        torch.distributed.all_reduce(loss)
        losses.append(loss.item())
    return losses


def _save(rank: int, world: int, folder: Path, plan: Plan, options: dict) -> list[float]:
    """3 steps, a checkpoint, 3 more."""
    model, optimizer = _build(plan, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    _steps(model, optimizer, plan, range(3))
    schedule.step()
    schedule.step()
    model.seen.fill_(3)
    checkpoint.save(folder, 3, optimizer, {"schedule": schedule.state_dict(), "note": "after three"})
    return _steps(model, optimizer, plan, range(3, 6))


def _resume(rank: int, world: int, folder: Path, plan: Plan, options: dict) -> list[float]:
    model, optimizer = _build(plan, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    with torch.no_grad():
        for master in optimizer.masters.flat:
            master.add_(1.0)  # what is there before must not matter
    step, extra = checkpoint.load(folder, optimizer)
    schedule.load_state_dict(extra["schedule"])
    assert step == 3 and extra["note"] == "after three" and schedule.last_epoch == 2
    assert model.seen.tolist() == [3, 3]
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-3]
    return _steps(model, optimizer, plan, range(3, 6))


def _entries(folder: Path) -> dict[str, Entry]:
    return read_index(folder / "step-00000003").entries


def _plan(name: str, topology: Topology) -> Plan:
    return plans.unquantised(plans.named(name, topology))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, launch(_save, 8, folder, _plan("hierarchical", EIGHT), {}, timeout_s=60)[0]


@pytest.mark.parametrize(
    ("name", "topology"),
    [("hierarchical", EIGHT), ("zeropp", EIGHT), ("zero3", FOUR), ("hierarchical", FOUR), ("ddp", TWO), ("mics", FOUR)],
    ids=lambda value: value if isinstance(value, str) else f"{value.world_size} ranks",
)
def test_losses_go_on_under_another_plan_and_world_size(saved, name, topology):
    folder, expected = saved
    found = launch(_resume, topology.world_size, folder, _plan(name, topology), {}, timeout_s=60)[0]
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
    if (name, topology) == ("hierarchical", EIGHT):
        assert found == expected  # to the last bit


@pytest.mark.parametrize("optimizer_plan", ["ddp", "mics", "zero2"])
def test_replicas_are_saved_once_and_other_plans_read_them(tmp_path, optimizer_plan):
    expected = launch(_save, 4, tmp_path, _plan(optimizer_plan, FOUR), {}, timeout_s=60)[0]
    found = launch(_resume, 8, tmp_path, _plan("hierarchical", EIGHT), {}, timeout_s=60)[0]
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=0)
    entries = _entries(tmp_path)
    ranks = {chunk.rank for entry in entries.values() for chunk in entry.chunks}
    assert len(ranks) == 4  # each writes some
    sizes = sum(path.stat().st_size for path in tmp_path.glob("step-00000003/rank-*.bin"))
    assert sizes == sum(entry.numel * entry.dtype.itemsize for entry in entries.values())


def test_a_quantised_float16_run_goes_on_bit_for_bit(tmp_path):
    options = {"weight_dtype": torch.float16}
    expected = launch(_save, 4, tmp_path, plans.hierarchical(FOUR), options, timeout_s=60)[0]
    assert launch(_resume, 4, tmp_path, plans.hierarchical(FOUR), options, timeout_s=60)[0] == expected


def _reference_state(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    _, optimizer = _build(_plan("ddp", frontier(1, 1, 1)))
    checkpoint.load(folder, optimizer)
    return {name: tensor.full_tensor() for name, tensor in optimizer.model.named_parameters()}


def test_consolidated_is_the_models_state_dict(saved):
    folder, _ = saved
    model = GPT(SHAPE)
    model.register_buffer("seen", torch.zeros(2))
    model.load_state_dict(checkpoint.consolidated(folder))
    assert model.head.weight is model.tokens.weight and model.seen.tolist() == [3, 3]
    reference = launch(_reference_state, 1, folder, timeout_s=60)[0]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, reference[name]), name


def _reads_all(rank: int, world: int, folder: Path, topology: Topology) -> None:
    expected = checkpoint.consolidated(folder)
    for name in plans.NAMED:
        _, optimizer = _build(_plan(name, topology))
        checkpoint.load(folder, optimizer)
        optimizer.synchronize()
        for each, tensor in optimizer.model.named_parameters():
            assert torch.equal(tensor.full_tensor(), expected[each]), (name, each)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("topology", [frontier(3, 1, 1), frontier(3, 1, 2)], ids=["3 ranks", "6 ranks"])
def test_every_plan_reads_it_on_odd_world_sizes(saved, topology):
    launch(_reads_all, topology.world_size, saved[0], topology, timeout_s=200)


class _Half(nn.Module):
    """Its second block is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def _steps_counted(rank: int, world: int, folder: Path) -> list[dict[str, float]]:
    """Of each parameter that has states: the step counter, before saving and after loading."""
    counted = []
    for resumes in (False, True):
        model = _Half()
        optimizer = ZeroOptimizer(model, _plan("hierarchical", TWO), torch.optim.AdamW, lr=1e-2)
        if resumes:
            checkpoint.load(folder, optimizer)
        else:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            checkpoint.save(folder, 1, optimizer)
        states = optimizer.masters.inner.state
        segments = [segment for of_bucket in optimizer.masters.segments for segment in of_bucket]
        counted.append({s.pieces[0].name: states[s.values]["step"].item() for s in segments if states[s.values]})
    return counted


def test_a_parameter_that_no_step_reached_has_no_state_after_loading_either(tmp_path):
    """Adam's step counter is one for a bucket: with other buckets it would get another's, which is refused."""
    for saved, loaded in launch(_steps_counted, 2, tmp_path, timeout_s=60):
        assert saved == loaded == {"blocks.0.weight": 1.0}
    for message in launch(_other_buckets, 2, tmp_path, timeout_s=60):
        assert "of blocks.1.weight and blocks.0" in message and "one has no states" in message


def _resumed_head(rank: int, world: int, folder: Path) -> list[bool]:
    """The second of two heads is trained from the second step on. Weights without a break, and after loading there."""
    weights = []
    for resumes in (False, True):
        torch.manual_seed(0)
        heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        model = nn.Sequential(heads)
        model.forward = lambda number, heads=heads: heads[number](torch.ones(1, 4))
        optimizer = ZeroOptimizer(model, _plan("hierarchical", TWO), torch.optim.AdamW, lr=1e-2)
        for step in (1, 2, 3):
            if resumes and step == 1:
                continue
            if resumes and step == 2:
                checkpoint.load(folder, optimizer)
            model(int(step > 1)).sum().backward()
            optimizer.step()
            if step == 1:
                checkpoint.save(folder, 1, optimizer)
        weights.append([flat.clone() for flat in optimizer.masters.flat])
    return [torch.equal(*both) for both in zip(*weights, strict=True)]


def test_a_head_that_rests_goes_on_by_its_momentum_after_loading_too(tmp_path):
    assert launch(_resumed_head, 2, tmp_path, timeout_s=60) == [[True, True]] * 2


def _frozen_loaded(rank: int, world: int, folder: Path) -> list[float]:
    """Outputs of a frozen block: of the run that saves it, and of one that has computed with another before it loads."""
    outputs = []
    for value in (2.0, 5.0):
        blocks = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        for block in blocks:
            nn.init.constant_(block.weight, value)
        blocks[0].requires_grad_(False)
        model = nn.Sequential(blocks)
        model.forward = lambda x, blocks=blocks: blocks[1](blocks[0](x))
        plan = plans.unquantised(plans.hpz(FOUR))
        optimizer = ZeroOptimizer(model, plan, torch.optim.SGD, lr=0.1, weight_dtype=torch.float32)
        with torch.no_grad():
            model(torch.ones(1, 2))
        if value == 2.0:
            checkpoint.save(folder, 1, optimizer)
        else:
            checkpoint.load(folder, optimizer)
        with torch.no_grad():
            outputs.append(model(torch.ones(1, 2))[0, 0].item())
    return outputs


def test_frozen_weights_are_those_of_the_checkpoint_at_once(tmp_path):
    assert launch(_frozen_loaded, 4, tmp_path, timeout_s=60) == [[16.0, 16.0]] * 4


def _other_buckets(rank: int, world: int, folder: Path) -> str:
    model = _Half()
    optimizer = ZeroOptimizer(model, _plan("hierarchical", TWO), torch.optim.AdamW, buckets=[], lr=1e-2)
    with pytest.raises(checkpoint.CheckpointError) as caught:
        checkpoint.load(folder, optimizer)
    return str(caught.value)


class _Normed(nn.Module):
    """A block with a buffer that a state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def _wrapped(rank: int, world: int, folder: Path) -> tuple[dict, dict, list[float]]:
    """Of a model with a checkpointed and a compiled block: what was saved, what a plain model has after loading it, and
    a buffer before and after."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    blocks = [checkpoint_wrapper(_Normed()), torch.compile(_Normed(), backend="eager")]
    model = nn.Sequential(nn.ModuleList(blocks))
    model.forward = lambda x: blocks[1](blocks[0](x))
    model.register_buffer("mask", torch.tensor([[1.0, 2.0]]).expand(3, 2))  # a number stands in several places
    optimizer = ZeroOptimizer(model, _plan("hierarchical", TWO), weight_dtype=torch.float32, lr=1e-2)
    model(torch.randn(6, 4)).sum().backward()
    optimizer.step()
    checkpoint.save(folder, 3, optimizer)
    mean = blocks[0].norm.running_mean
    before = mean.tolist()
    mean.zero_()
    checkpoint.load(folder, optimizer)
    assert model.mask.tolist() == [[1.0, 2.0]] * 3 and model.mask.stride(0) == 0
    plain = nn.Sequential(nn.ModuleList([_Normed(), _Normed()]))
    plain.register_buffer("mask", torch.zeros(3, 2))
    plain.load_state_dict(saved := checkpoint.consolidated(folder))
    return saved, plain.state_dict(), [before, mean.tolist()]


def test_wrappers_of_torch_leave_no_mark_on_names_and_lose_no_buffer(tmp_path):
    saved, plain, (before, after) = launch(_wrapped, 2, tmp_path, timeout_s=60)[0]
    assert before == after and any(before)
    assert plain.keys() == saved.keys() and plain["0.0.norm.running_mean"].tolist() == before
    assert not torch.equal(saved["0.1.norm.running_var"], torch.ones(4))


def test_a_folder_of_a_number_that_is_no_step_is_not_ours(tmp_path):
    for number in (7, 2**63 - 1, 2**63):
        (tmp_path / f"step-{number:08d}").mkdir()
    assert checkpoint.steps(tmp_path) == [7, 2**63 - 1]


# --- kills ---


def _killed_while_saving(rank: int, world: int, folder: Path, moment: str) -> None:
    model, optimizer = _build(_plan("hierarchical", FOUR))
    _steps(model, optimizer, _plan("hierarchical", FOUR), range(1))
    checkpoint.save(folder, 1, optimizer)
    _steps(model, optimizer, _plan("hierarchical", FOUR), range(1, 2))
    if rank == {"a rank's file": 2, "the rename": 0}[moment]:
        name = {"a rank's file": "fsync", "the rename": "rename"}[moment]
        setattr(os, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    checkpoint.save(folder, 2, optimizer)


def _step_of(rank: int, world: int, folder: Path) -> int:
    model, optimizer = _build(_plan("hierarchical", FOUR))
    step, _ = checkpoint.load(folder, optimizer)
    _steps(model, optimizer, _plan("hierarchical", FOUR), range(1, 3))
    checkpoint.save(folder, 3, optimizer, keep=1)
    return step


@pytest.mark.parametrize("moment", ["a rank's file", "the rename"])
def test_a_kill_while_saving_leaves_the_previous_checkpoint(tmp_path, moment):
    with pytest.raises(RankError, match="killed by signal 9"):
        launch(_killed_while_saving, 4, tmp_path, moment, timeout_s=60)
    assert (tmp_path / ".step-00000002").is_dir() and checkpoint.steps(tmp_path) == [1]
    assert launch(_step_of, 4, tmp_path, timeout_s=60) == [1] * 4
    assert checkpoint.steps(tmp_path) == [3] and not list(tmp_path.glob(".step-*"))  # swept and thinned out


# --- refusals ---


def _refuse(rank: int, world: int, folder: Path) -> list[str]:
    messages = []
    plan = _plan("zero3", TWO)
    model, optimizer = _build(plan)
    one_group, wider, turned = (
        _build(plan, **change)[1]
        for change in ({"grouped": False}, {"shape": replace(SHAPE, hidden=48)}, {"seen": (1, 2)})
    )
    unlike = ZeroOptimizer(GPT(SHAPE), plan, lr=1e-2)
    model(*batch(0, rank)).backward()
    for action in (
        lambda: checkpoint.load(folder / "nowhere", optimizer),
        lambda: checkpoint.load(folder, optimizer, step=7),
        lambda: checkpoint.load(folder, unlike),
        lambda: checkpoint.load(folder, one_group),
        lambda: checkpoint.load(folder, wider),
        lambda: checkpoint.load(folder, turned),
        lambda: checkpoint.save(folder, 9, optimizer),
        lambda: (optimizer.zero_grad(), checkpoint.save(folder, 3, optimizer)),
    ):
        with pytest.raises((ValueError, RuntimeError, FileExistsError)) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_what_it_refuses(saved):
    expected = [
        "nowhere has no complete checkpoint",
        "has no step 7; complete are 3",
        "seen is in the checkpoint only",
        ", 1], in the model ['master', ",
        ", 48], 0]",
        "seen is ['buffer', 'seen', [2], None], in the model ['buffer', 'seen', [1, 2], None]",
        "save after step(), not between backward and step",
        "step-00000003 is there already",
    ]
    for found, wanted in zip(launch(_refuse, 2, saved[0], timeout_s=60)[0], expected, strict=True):
        assert wanted in found


def test_adam_states_of_the_setting_are_all_there(saved):
    """Nothing but a name stands between a key and its tensor: the kinds that AdamW has, for every trained parameter."""
    keys = _entries(saved[0])
    trained = {key.removeprefix("master/") for key in keys if key.startswith("master/")}
    for kind in ("state/exp_avg", "state/exp_avg_sq", "number/step"):
        assert {key.removeprefix(f"{kind}/") for key in keys if key.startswith(f"{kind}/")} == trained
    assert {key for key in keys if key.startswith("frozen/")} == {
        "frozen/blocks.0.up.weight",
        "frozen/blocks.0.up.bias",
    }
