"""What a training loop of one's own needs of the engine, each against DistributedDataParallel or a single process."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from ddp_reference import SHAPE, Setting, batch, compare, train_ddp, train_plan
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from repro.launch import launch
from repro.models.gpt import GPT, GPTConfig
from repro.topology import frontier
from repro.zero import LossScale, ZeroOptimizer
from repro.zero import checkpoint as checkpoints
from repro.zero import plan as plans
from repro.zero.materialise import default_device

PAIRS = frontier(2, 1, 2)  # 2 nodes of one pair: the smallest machine on which every level of a plan differs
HIERARCHICAL = plans.unquantised(plans.hierarchical(PAIRS, gradients="package"))
ZEROPP = plans.unquantised(plans.zeropp(PAIRS))
SMALL = replace(SHAPE, layers=1)


def _matches_ddp(setting: Setting, chosen=(HIERARCHICAL, ZEROPP), rtol: float = 2e-5, **options) -> torch.Tensor:
    reference, found = compare(setting, list(chosen), **options)
    for plan, run in zip(chosen, found, strict=True):
        torch.testing.assert_close(run, reference, rtol=rtol, atol=0, msg=lambda text, p=plan: f"{p.name}: {text}")
    return reference


def _share_between_blocks(model: nn.Module) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight
    model.blocks[1].qkv = model.blocks[0].qkv


def _freeze(model: nn.Module) -> None:
    model.positions.weight.requires_grad_(False)
    model.blocks[0].up.requires_grad_(False)


def test_accumulation_with_tied_and_frozen_weights():
    _matches_ddp(Setting(steps=4, tied=True, change=_freeze, micro_batches=(1, 2)))


def test_weights_shared_between_blocks():
    _matches_ddp(Setting(steps=3, change=_share_between_blocks))


class _Checkpointed(nn.Module):
    """Recomputes a block in the backward: FSDP's hooks must gather its weights once more, and not twice."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def _checkpoint_activations(model: nn.Module) -> None:
    model.blocks = nn.ModuleList(_Checkpointed(block) for block in model.blocks)


def test_activation_checkpointing():
    _matches_ddp(Setting(steps=3, change=_checkpoint_activations))


def _compile_blocks(backend: str, model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_compiled_blocks(backend):
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(1))  # what it takes is loaded here, not in every rank
    _matches_ddp(Setting(steps=3, shape=SMALL, change=partial(_compile_blocks, backend)))


ELEMENTWISE = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
]


def _every_optimizer(rank: int, world: int) -> list:
    """A single pair without any sum over more than two ranks: equal to the last bits, also for Rprop, which looks at
    signs."""
    plan = plans.unquantised(plans.hierarchical(frontier(1, 1, 2), gradients="package", optimizer="package"))
    found = []
    for optimizer in ELEMENTWISE:
        setting = Setting(steps=4, shape=SMALL, optimizer=optimizer, lr=1e-2)
        found.append((train_ddp(rank, world, setting), train_plan(rank, setting, plan)))
    return found


@pytest.mark.slow
def test_every_elementwise_optimizer():
    for optimizer, (reference, found) in zip(ELEMENTWISE, launch(_every_optimizer, 2, timeout_s=120)[0], strict=True):
        torch.testing.assert_close(found, reference, rtol=2e-5, atol=0, msg=lambda text, o=optimizer: f"{o}: {text}")


def _decay_groups(model: nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def _groups_and_schedule(rank: int, world: int, plan: plans.Plan | None) -> list[float]:
    setting = Setting(shape=SMALL)
    model = setting.model()
    if plan is None:
        optimizer = torch.optim.AdamW(_decay_groups(model), lr=1e-2)
        model = nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = ZeroOptimizer(
            model, plan, torch.optim.AdamW, _decay_groups(model), weight_dtype=torch.float32, lr=1e-2
        )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    losses = []
    for step in range(5):
        losses.append(setting.step(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return [*losses, *(group["lr"] for group in optimizer.param_groups)]


def test_parameter_groups_and_a_learning_rate_schedule():
    reference = launch(_groups_and_schedule, 4, None, timeout_s=60)
    found = launch(_groups_and_schedule, 4, HIERARCHICAL, timeout_s=60)
    torch.testing.assert_close(found, reference, rtol=2e-5, atol=0)
    assert found[0][-2:] == pytest.approx([1e-4, 2e-4])


def _sum_of_losses(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")


def _uneven(rank: int, world: int) -> list[float]:
    """Rank r has r sequences in the last micro-batch, rank 0 none. Losses are divided by the tokens of all ranks, and
    multiplied by the ranks, since the engine takes the mean."""
    model = Setting(shape=SMALL).model()
    optimizer = ZeroOptimizer(model, HIERARCHICAL, torch.optim.SGD, weight_dtype=torch.float32, lr=0.5)
    norms = []
    for step in range(3):
        for micro_batch, rows in enumerate((4, rank)):
            tokens, targets = (torch.cat((x, x))[:rows] for x in batch(step, rank, micro_batch))
            (_sum_of_losses(model, tokens, targets) * world / (8 * 22)).backward()
        norms.append(optimizer.step())
    return norms


def _uneven_reference() -> list[float]:
    """The same sequences of all 4 ranks in one process."""
    model = Setting(shape=SMALL).model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in range(3):
        for rank in range(4):
            for micro_batch, rows in enumerate((4, rank)):
                tokens, targets = (torch.cat((x, x))[:rows] for x in batch(step, rank, micro_batch))
                (_sum_of_losses(model, tokens, targets) / (8 * 22)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_an_uneven_last_micro_batch_down_to_no_sequence_at_all():
    torch.testing.assert_close(launch(_uneven, 4, timeout_s=60)[0], _uneven_reference(), rtol=2e-5, atol=0)


class _Detour(nn.Module):
    """A GPT with a bucket that no forward reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(SMALL)
        self.spare = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, targets)


def _unused(rank: int, world: int) -> bool:
    torch.manual_seed(0)
    model = _Detour()
    optimizer = ZeroOptimizer(model, HIERARCHICAL, lr=0.1)
    before = [state.clone() for state in optimizer.masters.flat]
    model(*batch(0, rank)).backward()
    optimizer.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, optimizer.masters.flat, strict=True)]
    return changed == [True, False, True]  # block, spare, root


def test_a_bucket_without_a_gradient_is_left_alone():
    assert all(launch(_unused, 4, timeout_s=60))


# --- float16 ---


def test_float16_stays_near_fp32():
    chosen = (HIERARCHICAL, ZEROPP)
    reference, found = compare(Setting(), chosen, weight_dtype=torch.float16)
    for run in found:
        torch.testing.assert_close(run[..., 0], reference[..., 0], rtol=1e-2, atol=0)
        torch.testing.assert_close(run[..., 1], reference[..., 1], rtol=5e-2, atol=0)


def _tiny_gradients(rank: int, world: int) -> list[float]:
    norms = []
    for dtype in (torch.float32, torch.float16):
        model = Setting(shape=SMALL).model()
        optimizer = ZeroOptimizer(model, HIERARCHICAL, torch.optim.SGD, weight_dtype=dtype, lr=0.5)
        logits = model(batch(0, rank)[0])
        (F.cross_entropy(logits.float().flatten(0, 1), batch(0, rank)[1].flatten()) * 1e-6).backward()
        norms.append(optimizer.step())
    return norms


def test_float16_keeps_gradients_far_below_its_range():
    """Gradients of a loss divided by 1e6 are around 1e-8: zero in float16 without scaling."""
    exact, found = launch(_tiny_gradients, 4, timeout_s=60)[0]
    assert exact < 1e-5 and found == pytest.approx(exact, rel=0.02)


def _overflow(rank: int, world: int) -> dict:
    """Only rank 3's loss overflows: all ranks must leave the step out."""
    model = Setting(shape=SMALL).model()
    scale = LossScale(initial=4.0, growth_interval=2)
    optimizer = ZeroOptimizer(model, plans.hierarchical(PAIRS, gradients="package"), loss_scale=scale, lr=0.1)
    seen, before = {}, [master.clone() for master in optimizer.masters.flat]
    for step in range(4):
        loss = model(*batch(step, rank))
        (loss * (float("inf") if step == 0 and rank == 3 else 1.0)).backward()
        norm = optimizer.step()
        if step == 0:
            seen["untouched"] = all(map(torch.equal, before, optimizer.masters.flat))
            seen["finite"] = norm < float("inf")
        seen[f"scale {step}"] = scale.value
    return seen | {"skipped": scale.skipped}


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    for seen in launch(_overflow, 4, timeout_s=60):
        assert seen == {
            "untouched": True,
            "finite": False,
            "scale 0": 2.0,
            "scale 1": 2.0,
            "scale 2": 4.0,  # two good steps
            "scale 3": 4.0,
            "skipped": 1,
        }


# --- models that come on the meta device ---


def _meta(rank: int, world: int, tied: bool) -> list:
    setting = Setting(steps=2, tied=tied)
    curves = []
    for real in (True, False):
        torch.manual_seed(7)
        config = replace(SHAPE, tied=tied)
        if real:
            model = GPT(config)
            for module in model.modules():
                _fill(module)
        else:
            with torch.device("meta"):
                model = GPT(config)
        optimizer = ZeroOptimizer(
            model, HIERARCHICAL, init=_fill, weight_dtype=torch.float32, lr=1e-2, device="cpu", broadcast=rank > 9
        )
        curve = []
        for step in range(setting.steps):
            curve.append(setting.step(model, rank, step))
            curve.append(optimizer.step())
        curves.append(curve)
    return curves


def _fill(module: nn.Module) -> None:
    """The same values in whichever order the modules come."""
    for name, parameter in module.named_parameters(recurse=False):
        draw = torch.Generator().manual_seed(len(name) + parameter.numel())
        nn.init.normal_(parameter, std=0.02, generator=draw)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_on_the_meta_device_becomes_real_bucket_by_bucket(tied):
    for real, meta in launch(_meta, 4, tied, timeout_s=60):
        assert real == meta


# --- what is left ---


def _look_between_steps(rank: int, world: int) -> tuple[float, float, float]:
    """An evaluation after the backward: same weights before the step, new ones after it, in spite of the secondary
    shards."""
    model = Setting().model()
    optimizer = ZeroOptimizer(model, ZEROPP, torch.optim.SGD, weight_dtype=torch.float32, lr=0.5)
    loss = model(*batch(0, rank))
    loss.backward()
    with torch.no_grad():
        before = model(*batch(0, rank)).item()
    optimizer.step()
    with torch.no_grad():
        after = model(*batch(0, rank)).item()
        torch.testing.assert_close(model(*batch(0, rank)).item(), after)
    return loss.item(), before, after


def test_a_forward_outside_training_sees_the_current_weights():
    for loss, before, after in launch(_look_between_steps, 4, timeout_s=100):
        assert before == pytest.approx(loss, rel=1e-6)
        assert after < loss - 0.01


def _broadcast(rank: int, world: int) -> list[float]:
    torch.manual_seed(rank)
    model = GPT(SHAPE)
    ZeroOptimizer(model, plans.ddp(frontier(1, 1, 2)), weight_dtype=torch.float32, lr=1e-3)
    return model(torch.arange(8)[None]).flatten().tolist()


def test_ranks_start_from_the_weights_of_rank_0():
    torch.manual_seed(0)
    expected = GPT(SHAPE)(torch.arange(8)[None]).flatten().tolist()
    first, second = launch(_broadcast, 2, timeout_s=100)
    assert first == second == pytest.approx(expected, rel=1e-5, abs=1e-6)


def _broadcast_strided(rank: int, world: int) -> list:
    model = GPT(SHAPE)
    model.register_buffer("expanded", torch.full((1, 1), 7.0 + rank).expand(300, 300))
    model.register_buffer("every_other", (torch.arange(8.0) + 100 * rank)[::2])
    beside = torch.full((1000,), 5.0)
    ZeroOptimizer(model, plans.ddp(frontier(1, 1, 2)), weight_dtype=torch.float32, lr=1e-3)
    return [model.expanded.unique().tolist(), model.every_other.tolist(), beside.unique().tolist()]


def test_buffers_that_are_not_contiguous_are_rank_0s_too():
    assert launch(_broadcast_strided, 2, timeout_s=100) == [[[7.0], [0.0, 2.0, 4.0, 6.0], [5.0]]] * 2


def _frozen_bytes(rank: int, world: int) -> tuple[int, int]:
    model = GPT(SHAPE)
    model.blocks[0].requires_grad_(False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = ZeroOptimizer(model, plans.zero3(frontier(1, 1, 2)), lr=1e-3)
    return optimizer.held_bytes()["weights"], parameters


def test_frozen_weights_are_counted():
    (held, parameters), _ = launch(_frozen_bytes, 2, timeout_s=100)
    assert held == pytest.approx(2 * parameters / 2, rel=0.01)


def _changed_frozen(rank: int, world: int, folder: Path) -> list[str]:
    """What is said when another parameter is to be trained than when the model was wrapped."""
    model, messages = GPT(SHAPE), []
    model.blocks[0].requires_grad_(False)
    optimizer = ZeroOptimizer(model, HIERARCHICAL, lr=1e-3)
    for trained in (model.blocks[0].up.weight, model.blocks[1].up.weight):
        trained.requires_grad_(not trained.requires_grad)
        for action in (lambda: model(*batch(0, rank)), lambda: checkpoints.save(folder, 1, optimizer)):
            with pytest.raises(RuntimeError) as caught:
                action()
            messages.append(str(caught.value))
        trained.requires_grad_(not trained.requires_grad)
    model(*batch(0, rank)).backward()
    optimizer.step()
    return messages


def test_what_is_trained_is_settled_when_the_model_is_wrapped(tmp_path):
    unfrozen, at_save, frozen, _ = launch(_changed_frozen, 4, tmp_path, timeout_s=100)[0]
    assert "requires_grad of blocks.0.up.weight was False when the model was wrapped and is True" in unfrozen
    assert "requires_grad of blocks.0.up.weight" in at_save
    assert "requires_grad of blocks.1.up.weight was True when the model was wrapped and is False" in frozen


def _train_with_buffers(rank: int, world: int, buffer_dtype: torch.dtype | None) -> list[tuple[torch.dtype, bool]]:
    torch.manual_seed(0)
    model = GPT(SMALL)
    frequencies = 10000.0 ** -(torch.arange(16) / 16)  # as rotary positions have them
    model.blocks[0].register_buffer("frequencies", frequencies.clone(), persistent=False)
    model.register_buffer("turns", torch.polar(torch.ones(16), frequencies), persistent=False)
    optimizer = ZeroOptimizer(model, HIERARCHICAL, buffer_dtype=buffer_dtype, lr=1e-3)
    model(*batch(0, rank)).backward()
    optimizer.step()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    assert dtypes == {torch.bfloat16}
    kept = model.blocks[0].frequencies, model.turns
    return [
        (b.dtype, torch.equal(b, v))
        for b, v in zip(kept, (frequencies, torch.polar(torch.ones(16), frequencies)), strict=True)
    ]


def _train_without_and_with_a_dtype(rank: int, world: int) -> list:
    return [_train_with_buffers(rank, world, dtype) for dtype in (None, torch.bfloat16)]


def test_buffers_stay_as_they_are_unless_a_dtype_is_asked_for():
    exact = [(torch.float32, True), (torch.complex64, True)]
    rounded = [(torch.bfloat16, False), exact[1]]
    assert launch(_train_without_and_with_a_dtype, 4, timeout_s=100)[0] == [exact, rounded]


def test_a_model_that_is_left_on_the_cpu_beside_a_gpu_is_warned_of(monkeypatch, recwarn):
    model = nn.Linear(2, 2)
    assert default_device(model) == "cpu" and (torch.cuda.is_available() or not recwarn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.warns(UserWarning, match=r"on the CPU and trains there, beside a GPU: model\.cuda\(\) first"):
        assert default_device(model) == "cpu"
    assert default_device(model.to("meta")) == "cuda"


def test_loss_scale_survives_a_checkpoint():
    scale, copy = LossScale(8.0), LossScale()
    scale.update(False)
    copy.load_state_dict(scale.state_dict())
    assert (copy.value, copy.skipped) == (4.0, 1)


@dataclass(frozen=True)
class _Output:
    loss: torch.Tensor
    note: str = ""


class _Hidden:
    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: {"loss": (x, "a", None)}, _Output, lambda x: [_Output(x)]])
def test_loss_scale_reaches_tensors_in_what_a_model_returns(pack):
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            return pack(super().forward(x).sum())

    model = Model(2, 1)
    LossScale(8.0).attach(model)
    found = model(torch.ones(1, 2))
    while not isinstance(found, torch.Tensor):
        found = found.loss if isinstance(found, _Output) else found["loss"] if isinstance(found, dict) else found[0]
    found.backward()
    assert model.bias.grad.item() == 8


@pytest.mark.parametrize("give", [lambda m, x: m(x), lambda m, x: m(input=x)], ids=["by position", "by name"])
def test_gradients_that_leave_the_model_are_not_scaled(give):
    """Those of its inputs, of which one may be its own output."""
    model, scaled = nn.Linear(2, 2), nn.Linear(2, 2)
    scaled.load_state_dict(model.state_dict())
    LossScale(8.0).attach(scaled)
    inputs = [torch.ones(1, 2, requires_grad=True) for _ in range(2)]
    for each, x in zip((model, scaled), inputs, strict=True):
        give(each, give(each, x)).sum().backward()
    assert torch.equal(inputs[1].grad, inputs[0].grad)
    assert torch.equal(scaled.weight.grad, 8 * model.weight.grad)
    with torch.no_grad():
        assert torch.equal(scaled(inputs[1]), model(inputs[0]))


def test_loss_scale_refuses_an_output_that_hides_its_tensors():
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            return _Hidden(super().forward(x))

    model = Model(2, 1)
    LossScale(8.0).attach(model)
    with pytest.raises(TypeError, match="output has a _Hidden and no tensor with a gradient"):
        model(torch.ones(1, 2))
    model.eval()
    assert isinstance(model(torch.ones(1, 2)), _Hidden)


def test_default_buckets_of_nested_lists_are_what_has_a_forward():
    from repro.zero.buckets import default_buckets

    attention, ff, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    pair = nn.ModuleList([attention, nn.ModuleDict({"ff": ff})])
    assert default_buckets(nn.Sequential(nn.ModuleList([pair, norm]))) == [attention, ff, norm]


def test_default_buckets_are_blocks_that_share_nothing():
    from repro.zero.buckets import default_buckets

    model = GPT(GPTConfig(layers=3, hidden=8, heads=2))
    assert default_buckets(model) == list(model.blocks)
    model.blocks[2].up = model.blocks[0].up
    assert default_buckets(model) == [model.blocks[1]]
    model.blocks[1].norm1.weight = model.norm.weight
    assert default_buckets(model) == []
