"""What is under way while the program computes: it changes no bit, everybody waits for what it needs, and a rank that
is killed meanwhile ends all."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_reference import Setting, batch
from deaths import die, tell, told
from torch import Tensor, nn

from repro.launch import CollectiveHang, RankError, launch
from repro.models.gpt import GPTConfig
from repro.topology import frontier
from repro.zero import BrokenEngineError, ZeroOptimizer
from repro.zero import plan as plans

PAIRS = frontier(2, 1, 2)  # 2 nodes of one pair
QUANTISED = plans.hierarchical(PAIRS, gradients="package")
SHAPE = GPTConfig(layers=3, hidden=12, heads=2, seq_len=8, vocab=33)
SETTING = Setting(shape=SHAPE, max_norm=1.0)


def _engine(plan: plans.Plan = QUANTISED, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = SETTING.model()
    options = {"weight_dtype": torch.float32, "max_grad_norm": 1.0, "lr": 1e-2} | options
    return model, ZeroOptimizer(model, plan, **options)


# --- the same bits, whenever the messages go ---

PASSES = (2, 1, 3)  # in the steps of a run


def _steps(rank: int, way: str, plan: plans.Plan) -> list:
    """Losses, norms and masters of steps of unequal length."""
    options: dict[str, Any] = {"late_weights": way != "nothing overlaps"}
    if way.startswith("accumulation"):
        options["accumulation"] = int(way.removeprefix("accumulation "))
    model, optimizer = _engine(plan, **options)
    found: list = []
    for step, passes in enumerate(PASSES):
        for number in range(passes):
            if way == "no_sync" and number < passes - 1:
                with optimizer.no_sync():
                    (loss := model(*batch(step, rank, number))).backward()
            else:
                (loss := model(*batch(step, rank, number))).backward()
            found.append(loss.item())
        found.append(optimizer.step())
    return [*found, *(master.clone() for master in optimizer.masters.flat)]


WAYS = ("nothing overlaps", "only weights", "no_sync", "accumulation 3", "accumulation 4")


def _every_way(rank: int, world: int) -> dict[str, list]:
    return {way: _steps(rank, way, QUANTISED) for way in WAYS}


@pytest.mark.slow
def test_what_overlaps_changes_no_bit():
    """Also where `accumulation` is more than the passes of a step: what has not left goes in `step`."""
    for ways in launch(_every_way, 4, timeout_s=100):
        reference = ways.pop("nothing overlaps")
        for way, found in ways.items():
            for value, expected in zip(found, reference, strict=True):
                same = torch.equal(value, expected) if isinstance(value, Tensor) else value == expected
                assert same, f"{way}: {value} is not {expected}"


def _one_too_early(rank: int, world: int) -> list[list[float]]:
    plan = plans.unquantised(QUANTISED)
    ways = ("nothing overlaps", "accumulation 1", "accumulation 2")
    return [[value for value in _steps(rank, way, plan) if isinstance(value, float)] for way in ways]


def test_passes_after_the_one_that_was_said_to_be_the_last_count_as_well():
    """Their sums leave in `step`, and are added to what has left before: in another order, so in fp32."""
    for reference, *others in launch(_one_too_early, 4, timeout_s=100):
        for found in others:
            torch.testing.assert_close(found, reference, rtol=1e-5, atol=0)


# --- when they go ---


def _bytes_before_step(rank: int, world: int) -> dict[str, list[int]]:
    """Bytes that have crossed nodes after each of two backward passes, and after the step."""
    seen = {}
    for way in ("step", "accumulation", "no_sync"):
        model, optimizer = _engine(accumulation=2 if way == "accumulation" else None)
        seen[way] = []
        for number in range(2):
            if way == "no_sync" and number == 0:
                with optimizer.no_sync():
                    model(*batch(0, rank, number)).backward()
            else:
                model(*batch(0, rank, number)).backward()
            held = optimizer.held_bytes()["gradients"]  # (waits for what is under way)
            left = sum(bucket.gradient is None for bucket in optimizer.buckets)
            seen[way].append(optimizer.ledger.take()["cluster"])
        optimizer.step()
        sent = optimizer.ledger.take()
        optimizer.synchronize()
        seen[way] += [sent["cluster"], held, left]
    return seen


def test_gradients_leave_their_node_in_the_last_backward_and_only_then():
    for seen in launch(_bytes_before_step, 4, timeout_s=100):
        first, last, in_step, held, left = seen["step"]
        assert first == last == left == 0 < in_step
        for way in ("accumulation", "no_sync"):
            first, last, rest, *then = seen[way]
            assert first == 0 < last and last + rest == in_step, way
            assert then == [held, 4], way  # buckets: what has left counts as held until step


# --- who reads weights has the new ones ---


def _read(rank: int, world: int) -> dict[str, bool]:
    """After each step another reader; the weights must be the masters', which an engine that waits has sent at once."""
    plan = plans.unquantised(QUANTISED, 32)
    (model, late), (other, at_once) = _engine(plan), _engine(plan, late_weights=False)
    seen = {}
    for step, (how, read) in enumerate(READERS.items()):
        for each, optimizer in ((model, late), (other, at_once)):
            each(*batch(step, rank)).backward()
            optimizer.step()
        seen[how] = _equal(read(model, late), read(other, at_once))
    return seen


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def _local(model: nn.Module) -> Tensor:
    return torch.cat([value.to_local().flatten() for value in model.state_dict().values()])


def _directly(model: nn.Module, optimizer: ZeroOptimizer) -> Tensor:
    optimizer.synchronize()
    return torch.cat([parameter.to_local().flatten() for parameter in model.parameters()])


def _evaluated(model: nn.Module, optimizer: ZeroOptimizer) -> Tensor:
    with torch.no_grad():
        return torch.stack([model(*batch(90 + number, 0)) for number in range(2)])


def _by_hand(model: nn.Module, optimizer: ZeroOptimizer) -> Tensor:
    model.blocks[1].unshard()
    found = torch.cat([parameter.flatten().clone() for parameter in model.blocks[1].parameters()])
    model.blocks[1].reshard()
    return found


def _published(model: nn.Module, optimizer: ZeroOptimizer) -> Tensor:
    for master in optimizer.masters.flat:
        optimizer.synchronize()
        master.mul_(1.25)
    optimizer.publish()
    return torch.cat([bucket.sharded.read() for bucket in optimizer.buckets])


READERS: dict[str, Callable[[nn.Module, ZeroOptimizer], Any]] = {
    "state_dict": lambda model, optimizer: _local(model),
    "of a part": lambda model, optimizer: _local(model.blocks[2]),
    "synchronize": _directly,
    "evaluation": _evaluated,
    "unshard": _by_hand,
    "publish": _published,
    "a second step": lambda model, optimizer: (
        model(*batch(80, 0)).backward(),
        optimizer.step(),
        model(*batch(81, 0)).item(),
    )[1:],
}


def test_who_reads_weights_waits_for_them():
    for seen in launch(_read, 4, timeout_s=100):
        assert all(seen.values()), seen


def _replicated(rank: int, world: int) -> list[float]:
    """ZeRO-1: weights are replicated, so FSDP gathers nothing, and reads its own shard."""
    losses = []
    for late in (True, False):
        model, optimizer = _engine(plans.zero1(PAIRS), late_weights=late)
        for step in range(3):
            (loss := model(*batch(step, rank))).backward()
            losses.append(loss.item())
            losses.append(optimizer.step())
    return losses


def test_replicated_weights_are_waited_for_as_well():
    for losses in launch(_replicated, 4, timeout_s=100):
        assert losses[:6] == losses[6:]


def _alone(rank: int, world: int, looks: bool) -> float:
    model, optimizer = _engine()
    model(*batch(0, rank)).backward()
    optimizer.step()
    if looks and rank == 2:
        model.state_dict()
    dist.barrier()
    return model(*batch(1, rank)).item()


def test_one_rank_may_look_at_weights_while_the_others_wait_for_it():
    assert launch(_alone, 4, True, timeout_s=60) == launch(_alone, 4, False, timeout_s=60)


# --- a rank that is killed ---


class _Kills(torch.autograd.Function):
    """Kills this process in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, folder: Any) -> Tensor:
        ctx.folder = folder
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        die(ctx.folder, 2)
        return gradient, None


def _killed(rank: int, world: int, moment: str, folder: Any) -> None:
    """Rank 1 ends at `moment` of the second step. The others write down what ended them."""
    model, optimizer = _engine(accumulation=1)
    model(*batch(0, rank)).backward()
    optimizer.step()
    if rank == 1:
        _end_at(moment, model, optimizer, folder)
    try:
        for step in range(1, 4):
            model(*batch(step, rank)).backward()
            optimizer.step()
        said = "nothing"
    except Exception as error:
        said = type(error).__name__
    again = _said(lambda: model(*batch(9, rank)))
    tell(folder, rank, f"{said}, then {again}")


def _said(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _end_at(moment: str, model: nn.Module, optimizer: ZeroOptimizer, folder: Any) -> None:
    if moment == "weights under way":
        die(folder, 2)
    if moment == "averages under way":  # those of the layers above have left, or are leaving
        model.blocks[0].register_forward_hook(lambda module, args, output: _Kills.apply(output, folder))
    if moment == "second half of step":
        optimizer.masters.inner.step = lambda *_: die(folder, 2)


@pytest.mark.parametrize("moment", ["weights under way", "averages under way", "second half of step"])
def test_a_rank_that_is_killed_while_messages_are_under_way_ends_all(tmp_path, moment):
    with pytest.raises(RankError, match="rank 1 was killed by signal 9"):
        launch(_killed, 4, moment, tmp_path, timeout_s=60)
    typed = ("ExchangeError", "BrokenEngineError")
    assert len(told(tmp_path)) >= 2  # the third only talks to these
    for each in told(tmp_path):
        said, again = each.split(", then ")
        assert said in typed and again in (*typed, "RuntimeError"), each


def _elsewhere(rank: int, world: int) -> None:
    model, _ = _engine(plans.zero3(frontier(1, 1, 2)))
    if rank == 0:
        dist.barrier()
    model(*batch(0, rank))


def test_waiting_for_a_rank_that_is_elsewhere_is_a_hang_and_not_slow_work():
    with pytest.raises(CollectiveHang, match=r"comm/pending\.py"):
        launch(_elsewhere, 2, timeout_s=3)


def _raise_gone() -> Any:
    yield from ()
    raise ConnectionError("gone")


def _lost(rank: int, world: int) -> list[str]:
    """New weights do not arrive, of a step that has ended."""
    model, optimizer = _engine()
    model(*batch(0, rank)).backward()
    optimizer._publishing = lambda bucket, master: _raise_gone()
    optimizer.step()
    uses = (lambda: model(*batch(1, rank)), optimizer.zero_grad, optimizer.step, model.state_dict)
    return [_said(use) for use in uses]


def test_after_weights_were_lost_nothing_goes_on():
    for first, *later in launch(_lost, 4, timeout_s=60):
        assert first in ("ConnectionError", "BrokenEngineError")
        assert later == ["BrokenEngineError"] * 3


def _lost_within_step(rank: int, world: int) -> str:
    model, optimizer = _engine(late_weights=False)
    model(*batch(0, rank)).backward()
    optimizer._publishing = lambda bucket, master: _raise_gone()
    with pytest.raises(BrokenEngineError) as caught:
        optimizer.step()
    return str(caught.value)


def test_what_ended_a_step_is_said_once():
    for said in launch(_lost_within_step, 4, timeout_s=60):
        assert (
            said.startswith("step was ended by ConnectionError: gone. The engine") and said.count("cannot go on") == 1
        )
