"""Training: exceptions that a training loop survives, arguments that cannot work, weights that somebody else writes."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # AdamW imports it on first use: once here, not in every rank
import torch.distributed as dist
from attack.promises import refuses
from ddp_reference import Setting, backward, batch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from repro import quantize
from repro.comm import Communicator, Route, flat
from repro.launch import launch
from repro.models.gpt import GPTConfig
from repro.topology import Level, Topology, frontier
from repro.zero import BrokenEngineError, LossScale, Plan, ZeroOptimizer
from repro.zero import plan as plans
from repro.zero.masters import NOT_ELEMENTWISE

TWO, FOUR = frontier(1, 1, 2), frontier(2, 1, 2)
PLANS = {
    "ddp": plans.ddp(TWO),
    "zero3": plans.zero3(TWO),
    "zeropp": plans.zeropp(FOUR),
    "hierarchical": plans.hierarchical(FOUR, gradients="package"),  # INT8 weights, INT4 gradients
}
SETTING = Setting(steps=3, shape=GPTConfig(layers=3, hidden=12, heads=2, seq_len=8, vocab=33), max_norm=1.0)


class Survived(Exception):
    """What a training loop catches, and goes on."""


class _Raises(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise Survived


def _in_backward(of: str) -> Callable[[nn.Module, list[str]], None]:
    """At the output of a module, in the backward."""

    def watch(model: nn.Module, places: list[str]) -> None:
        def hook(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
            return _Raises.apply(output) if of in places else None

        model.get_submodule(of).register_forward_hook(hook)

    return watch


def _in_forward(of: str) -> Callable[[nn.Module, list[str]], None]:
    """At the input of a module, in the forward."""

    def watch(model: nn.Module, places: list[str]) -> None:
        def hook(module: nn.Module, args: tuple) -> None:
            if f"forward {of}" in places:
                raise Survived

        model.get_submodule(of).register_forward_pre_hook(hook)

    return watch


def _at_parameter(model: nn.Module, places: list[str]) -> None:
    """In a hook that the user put on a parameter."""

    def hook(parameter: Tensor) -> None:
        if "parameter" in places:
            raise Survived

    model.blocks[1].up.weight.register_post_accumulate_grad_hook(hook)


# place: what makes the model raise there. The order of the backward: loss, blocks.2, blocks.1, blocks.0, tokens.
PLACES: dict[str, Callable[[nn.Module, list[str]], None] | None] = {
    "loss": None,
    "head": _in_backward("head"),
    "blocks.2": _in_backward("blocks.2"),  # the last layer
    "blocks.2.norm2": _in_backward("blocks.2.norm2"),  # some gradients of the bucket are there, others are not
    "blocks.1": _in_backward("blocks.1"),  # between two buckets
    "blocks.0.qkv": _in_backward("blocks.0.qkv"),
    "tokens": _in_backward("tokens"),  # all buckets but the root's are reduced, or on their way
    "parameter": _at_parameter,
    "forward blocks.0": _in_forward("blocks.0"),
    "forward blocks.1.up": _in_forward("blocks.1.up"),
    "forward head": _in_forward("head"),
    "after forward": None,
    "after backward": None,
    "twice": None,  # torch's own error
}
QUICK = ("loss", "blocks.2", "blocks.2.norm2", "blocks.1", "tokens", "forward blocks.1.up", "after forward")
FIRST, TWICE, SECOND_MICRO_BATCH = "first pass", "twice after a step", "second micro-batch"
MOMENTS = (FIRST, TWICE, SECOND_MICRO_BATCH)


def _engine(plan: Plan, setting: Setting = SETTING, **options: Any) -> tuple[nn.Module, ZeroOptimizer]:
    model = setting.model()
    options = {"weight_dtype": torch.float32, "lr": setting.lr, "max_grad_norm": setting.max_norm} | options
    return model, ZeroOptimizer(model, plan, setting.optimizer, **options)


def _watched(plan: Plan, **options: Any) -> tuple[nn.Module, ZeroOptimizer, list[str]]:
    """An engine whose model raises at the places that are in the list."""
    model, optimizer = _engine(plan, **options)
    places: list[str] = []
    for watch in PLACES.values():
        if watch is not None:
            watch(model, places)
    return model, optimizer, places


def _fail(model: nn.Module, optimizer: ZeroOptimizer, places: list[str], place: str, rank: int) -> None:
    """A pass that ends at `place`, on a batch of its own."""
    places.append(place)
    try:
        loss = model(*batch(50, rank))
        if place == "after forward":
            raise Survived
        (_Raises.apply(loss) if place == "loss" else loss).backward()
        if place == "twice":
            loss.backward()
        assert place == "after backward", f"nothing raised at {place}"
    except (Survived, RuntimeError) as error:
        assert isinstance(error, Survived) or "backward through the graph a second time" in str(error), error
    finally:
        places.clear()


def _step(model: nn.Module, optimizer: ZeroOptimizer, rank: int, number: int) -> list:
    """An undisturbed step: loss, norm, and the masters afterwards."""
    loss = backward(model, [batch(number, rank)])
    norm = optimizer.step()
    optimizer.zero_grad()
    return [loss, norm, [master.clone() for master in optimizer.masters.flat]]


def _as_new(rank: int, world: int, plan: Plan, chosen: Sequence[str]) -> dict[tuple[str, str], str]:
    """(place, moment) to what is wrong with the step afterwards, "" if nothing is: it must be the same to the bit as
    that of an engine which knows of no exception."""
    once = {"communicator": Communicator(plan.topology), "broadcast": False}  # groups take longer than steps
    model, optimizer = _engine(plan, **once)
    reference = [_step(model, optimizer, rank, number) for number in range(len(MOMENTS))]
    verdicts = {}
    for place in chosen:
        model, optimizer, places = _watched(plan, **once)
        verdict = ""
        for number, moment in enumerate(MOMENTS):
            try:
                if moment == SECOND_MICRO_BATCH:
                    backward(model, [batch(60, rank)])
                for _ in range(2 if moment == TWICE else 1):
                    _fail(model, optimizer, places, place, rank)
                    optimizer.zero_grad()
                found = _step(model, optimizer, rank, number)
                if not _equal(found, reference[number]):
                    verdict = verdict or f"loss, norm {found[:2]}, expected {reference[number][:2]}"
            except Exception as error:
                verdict = verdict or f"{type(error).__name__}: {error}"
            verdicts[place, moment] = verdict
    return verdicts


def _equal(found: list, expected: list) -> bool:
    return found[:2] == expected[:2] and all(map(torch.equal, found[2], expected[2]))


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compiled or read from disk once here, and not in every rank."""
    quantize.warm_up()


@pytest.fixture(scope="module")
def after_exceptions() -> Callable[[str, bool], list[dict]]:
    """Verdicts of all ranks for a plan and the quick places, or the others; computed once."""

    @functools.cache
    def verdicts(name: str, quick: bool) -> list[dict]:
        chosen = [place for place in PLACES if (place in QUICK) == quick]
        return launch(_as_new, PLANS[name].topology.world_size, PLANS[name], chosen, timeout_s=200)

    return verdicts


def _as_new_rows() -> Iterator[Any]:
    for name, place, moment in itertools.product(PLANS, PLACES, MOMENTS):
        marks = () if place in QUICK and name == "hierarchical" else pytest.mark.exhaustive
        yield pytest.param(name, place, moment, id=f"{name}-{place}-{moment}", marks=marks)


@pytest.mark.parametrize(("name", "place", "moment"), [*_as_new_rows()])
def test_after_zero_grad_the_engine_is_as_new(after_exceptions, name, place, moment):
    for rank, verdicts in enumerate(after_exceptions(name, place in QUICK)):
        assert not verdicts[place, moment], f"rank {rank}: {verdicts[place, moment]}"


# --- an exception on one rank alone: the others have messages under way, and no step may come to its end ---

ALONE = [
    ("zero2", "forward blocks.1.up"),
    ("zero3", "blocks.1"),
    ("zero3", "after forward"),  # its next forward gathers a bucket of the size that others gather in their backward
    ("pair", "parameter"),
    # the rest in `make test-all`
    ("ddp", "blocks.1"),
    ("zero3", "loss"),
    ("zero3", "forward blocks.1.up"),
    ("zero3", "after backward"),
    ("pair", "blocks.1"),
    ("pair", "after forward"),
    ("pair", "after backward"),
]
TOGETHER = 4  # rows; more ranks than twice as many are slow to meet on two cores
PAIR = {"ddp": plans.ddp(TWO), "zero2": plans.zero2(TWO), "zero3": plans.zero3(TWO), "pair": plans.hierarchical(TWO)}


def _world_of_two(rank: int, folder: Path) -> int:
    """Leave the group of all and join one of two ranks; this one's number in it."""
    dist.barrier()  # nobody leaves before all are connected
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / str(rank // 2)), 2)
    dist.init_process_group("gloo", store=store, rank=rank % 2, world_size=2)
    return rank % 2


def _be_impatient(seconds: int) -> None:
    """From now on this rank waits so long for a message, in place of the half hour of a mesh's groups."""
    patient = dist.Work.wait
    dist.Work.wait = lambda work, *_: patient(work, timedelta(seconds=seconds))


def _said(call: Callable[[], object]) -> str:
    """What a call raised; "" for nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _alone(rank: int, world: int, folder: Path, first: int) -> dict[str, str]:
    """A world of two ranks per row from `first` on, all at the same time. The first rank of each fails; what each says."""
    name, place = ALONE[first + rank // 2]
    rank = _world_of_two(rank, folder)
    model, optimizer, places = _watched(PAIR[name])
    _step(model, optimizer, rank, 0)
    _be_impatient(2)
    said = {}
    if rank == 0:
        _fail(model, optimizer, places, place, rank)
        said["zero_grad"] = _said(optimizer.zero_grad)
    said["step"] = _said(lambda: _step(model, optimizer, rank, 1))
    said["zero_grad later"] = _said(optimizer.zero_grad)
    said["step later"] = _said(lambda: _step(model, optimizer, rank, 2))
    return said


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[int], list[dict[str, str]]]:
    """What the ranks of a row, and of those tried with it, say."""

    @functools.cache
    def said(first: int) -> list[dict[str, str]]:
        ranks = 2 * len(ALONE[first : first + TOGETHER])
        return launch(_alone, ranks, tmp_path_factory.mktemp("stores"), first, timeout_s=200)

    return said


def _alone_rows() -> Iterator[Any]:
    for row, (name, place) in enumerate(ALONE):
        yield pytest.param(row, id=f"{name}-{place}", marks=() if row < TOGETHER else pytest.mark.exhaustive)


@pytest.mark.parametrize("row", _alone_rows())
def test_one_rank_alone_cannot_go_on_and_nobody_steps(alone, row):
    _, place = ALONE[row]
    within = row % TOGETHER
    failed, other = alone(row - within)[2 * within : 2 * within + 2]
    typed = ("BrokenEngineError: ", "ExchangeError: ")
    assert failed["step"].startswith(typed) and other["step"].startswith(typed), (failed, other)
    assert failed["step later"].startswith(typed) and other["step later"].startswith(typed), (failed, other)
    if place not in ("loss", "after forward", "after backward"):  # there nothing shows that the pass is incomplete
        assert failed["zero_grad"].startswith(
            "BrokenEngineError: zero_grad after an exception in a forward or backward"
        )
        assert failed["step later"].startswith("BrokenEngineError: ") and "load a checkpoint" in failed["step later"]


def _apart(rank: int, world: int) -> list[str]:
    """The ranks fail at different places of one backward, behind different numbers of messages."""
    model, optimizer, places = _watched(PAIR["zero2"])
    _fail(model, optimizer, places, ("blocks.1", "head")[rank], rank)
    return [_said(optimizer.zero_grad), _said(lambda: _step(model, optimizer, rank, 1))]


def test_ranks_that_fail_at_different_places_are_told_so():
    for zero_grad, step in launch(_apart, 2, timeout_s=100):
        assert "BrokenEngineError" in zero_grad and "the ranks left it at different places" in zero_grad
        assert step.startswith("BrokenEngineError: zero_grad after an exception")


# --- the rest needs one rank only ---

ONE = frontier(1, 1, 1)
NAN, INF = float("nan"), float("inf")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Small(nn.Module):
    """Two blocks of 4 x 4 and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).sum()


def _small() -> Small:
    torch.manual_seed(0)
    return Small()


X = torch.ones(3, 4)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A process group of this process alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def _wrapped(model: nn.Module, **changes: Any) -> ZeroOptimizer:
    arguments = {"plan": plans.ddp(ONE), "optimizer_cls": torch.optim.SGD, "lr": 0.1, "weight_dtype": torch.float32}
    return ZeroOptimizer(model, **arguments | changes)


def _pass(model: nn.Module, optimizer: ZeroOptimizer) -> float:
    model(X).backward()
    return optimizer.step()


class _Scalar(Small):
    def __init__(self, value: Tensor | nn.Parameter, name: str = "extra") -> None:
        super().__init__()
        if isinstance(value, nn.Parameter):
            setattr(self, name, value)
        else:
            self.register_buffer(name, value)


def _with(value: Tensor | nn.Parameter) -> nn.Module:
    """A small model with one more parameter or buffer, `extra`."""
    torch.manual_seed(0)
    return _Scalar(value)


def _tied(model: Small) -> Small:
    model.head.weight = model.blocks[1].weight
    return model


def _on_meta(kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


class _Bare(nn.Module):
    """A parameter of its own and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def _made(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(1))], lr=0.1)


ROWS = [
    # argument, what is given for it (made from the model), words of the message
    *(
        pytest.param("weight_dtype", value, words, id=f"weights as {words[0]}")
        for value, words in (
            (torch.float64, ["torch.float64", "allowed: torch.float32, torch.bfloat16, torch.float16"]),
            (torch.int8, ["torch.int8"]),
            (torch.complex64, ["torch.complex64"]),
            (torch.float8_e4m3fn, ["torch.float8_e4m3fn"]),
            ("bfloat16", ["'bfloat16'"]),
            (None, ["None"]),
            (16, ["16"]),
        )
    ),
    pytest.param("buffer_dtype", torch.int8, ["torch.int8", "or None to leave buffers"], id="buffers as integers"),
    *(
        pytest.param("gradient_dtype", value, words, id=f"gradients as {words[0]}")
        for value, words in (
            (torch.int8, ["torch.int8", "allowed: torch.float32, torch.bfloat16, torch.float16"]),
            (torch.int32, ["torch.int32"]),
            (torch.bool, ["torch.bool"]),
            (torch.float64, ["torch.float64"]),
            (torch.complex64, ["torch.complex64"]),
            (torch.float8_e5m2, ["torch.float8_e5m2"]),
            ("float32", ["'float32'"]),
            (None, ["None"]),
            (0, ["0"]),
        )
    ),
    *(
        pytest.param(
            "accumulation", value, [repr(value), "an integer of at least 1, or None"], id=f"{value!r} at a time"
        )
        for value in (0, True)
    ),
    pytest.param("late_weights", 1, ["late_weights is 1", "True, False"], id="late weights 1"),
    *(
        pytest.param("optimizer_cls", kind, [f"{kind.__name__} is not elementwise"], id=kind.__name__)
        for kind in NOT_ELEMENTWISE
    ),
    *(
        pytest.param("max_grad_norm", value, [repr(value), "a positive finite number"], id=f"clip to {value!r}")
        for value in (-1, 0, 0.0, -0.5, NAN, INF, -INF, "1.0", True, [1.0], torch.tensor(1.0), 1j)
    ),
    *(
        pytest.param("loss_scale", value, [repr(value), "a zero.LossScale"], id=f"loss scale {value!r}")
        for value in (1024, 2.0, NAN, "dynamic", True)
    ),
    *(
        pytest.param("device", value, [repr(value), "'cpu', 'cuda'"], id=f"device {value!r}")
        for value in ("gpu", "cpu:0", "meta", "", 0, torch.device("cpu"))
    ),
    pytest.param("device", "cuda", ["'cuda'", "no GPU"], id="a GPU where there is none", marks=NO_GPU),
    *(
        pytest.param("broadcast", value, [repr(value), "True, False"], id=f"broadcast {value!r}")
        for value in ("no", 1, None, NAN)
    ),
    *(
        pytest.param("init", value, [repr(value), "a function of a module"], id=f"init {value!r}")
        for value in ("zeros", 0, NAN)
    ),
    *(
        pytest.param("communicator", value, [repr(value), "a comm.Communicator"], id=f"communicator {value!r}")
        for value in ("gloo", 1, False)
    ),
    pytest.param("plan", "zero3", ["'zero3'", "a repro.zero.Plan"], id="a plan by its name"),
    pytest.param("plan", None, ["None", "a repro.zero.Plan"], id="no plan"),
    pytest.param("plan", ONE, ["Topology", "a repro.zero.Plan"], id="a topology for a plan"),
    pytest.param("plan", plans.ddp, ["function", "a repro.zero.Plan"], id="a plan that nobody called"),
    *(
        pytest.param(
            "plan", plan(topology), [f"topology has {topology.world_size} ranks, the process group 1"], id=what
        )
        for plan, topology, what in (
            (plans.ddp, TWO, "a plan for two ranks"),
            (plans.zeropp, frontier(2, 2, 2), "a plan for eight ranks"),
            (plans.hierarchical, frontier(48), "a plan for Frontier"),
        )
    ),
    pytest.param("optimizer_cls", None, ["NoneType", "a class of torch.optim"], id="no optimizer"),
    pytest.param("optimizer_cls", "AdamW", ["str", "a class of torch.optim"], id="an optimizer by its name"),
    pytest.param("optimizer_cls", _made(torch.optim.SGD), ["SGD", "a class"], id="an optimizer made already"),
    pytest.param(
        "optimizer_cls", lambda groups, lr: groups, ["list", "torch.optim.Optimizer"], id="makes no optimizer"
    ),
    pytest.param(
        "optimizer_cls",
        lambda groups, lr: torch.optim.Adafactor(groups, lr=lr),
        ["Adafactor is not elementwise"],
        id="a function that makes an optimizer of whole tensors",
    ),
    pytest.param("lr", -1.0, ["learning rate: -1.0"], id="a negative learning rate"),
    pytest.param("momentum", -0.5, ["momentum value: -0.5"], id="negative momentum"),
    # parameters and groups
    pytest.param("params", 5, ["params is a int", "parameters of the model"], id="a number for parameters"),
    pytest.param("params", "all", ["params is a str"], id="a word for parameters"),
    pytest.param("params", torch.ones(3), ["params is a Tensor"], id="a tensor for parameters"),
    pytest.param(
        "params", [], ["blocks.0.weight requires a gradient but is in no parameter group"], id="no parameters"
    ),
    pytest.param("params", lambda m: m, ["params is a Small"], id="the model for its parameters"),
    pytest.param("params", lambda m: [m.head.weight], ["in no parameter group", "5 such"], id="some of the parameters"),
    pytest.param(
        "params", lambda m: m.named_parameters(), ["group 0 has ('blocks.0.weight'"], id="parameters with their names"
    ),
    pytest.param(
        "params",
        lambda m: [*m.parameters(), nn.Parameter(torch.ones(7))],
        ["group 0 has a tensor of shape (7,), which is no parameter of the model"],
        id="a parameter of another model",
    ),
    pytest.param(
        "params",
        lambda m: [{"params": list(m.parameters())}, {"params": [m.head.bias], "lr": 1.0}],
        ["groups 0 and 1 have the same parameter"],
        id="a parameter in two groups",
    ),
    pytest.param("params", lambda m: [{"lr": 0.1}], ["params[0]", "a key 'params'"], id="a group without parameters"),
    pytest.param(
        "params",
        lambda m: [{"params": list(m.parameters())}, m.head.bias],
        ["params[1]", "a dictionary"],
        id="groups and parameters mixed",
    ),
    # buckets
    pytest.param("buckets", 3, ["buckets is 3", "modules of the model"], id="a number for buckets"),
    pytest.param("buckets", ["blocks.0"], ["buckets[0]", "no part of the model"], id="a bucket by its name"),
    pytest.param("buckets", [nn.Linear(4, 4)], ["buckets[0] (Linear) is no part of the model"], id="a foreign bucket"),
    pytest.param("buckets", lambda m: [m], ["buckets[0] (Small) is no part"], id="the model as its own bucket"),
    pytest.param("buckets", lambda m: [m.blocks], ["buckets[0] (blocks) is a ModuleList"], id="a list as a bucket"),
    pytest.param(
        "buckets",
        lambda m: [m.head, m.blocks[0], m.head],
        ["buckets[2] (head) is in an earlier bucket already"],
        id="a bucket twice",
    ),
    pytest.param(
        "buckets",
        lambda m: [_tied(m).blocks[1]],
        ["buckets[0] (blocks.1) shares a parameter with a module outside"],
        id="a bucket with half of a tie",
    ),
    # models
    *(
        pytest.param("model", value, ["model is", "a torch.nn.Module"], id=f"model {value!r}")
        for value in (None, "gpt", 7, Small)
    ),
    pytest.param("model", nn.Identity(), ["no parameter that requires a gradient"], id="an empty model"),
    pytest.param(
        "model", lambda m: m.requires_grad_(False), ["no parameter that requires a gradient"], id="a frozen model"
    ),
    *(
        pytest.param(
            "model", lambda m, d=d: m.to(d), ["blocks.0.weight", str(d), "the masters need fp32"], id=f"a {d} model"
        )
        for d in (torch.bfloat16, torch.float16, torch.float64, torch.complex64)
    ),
    pytest.param("model", _with(nn.Parameter(torch.ones(2).half())), ["extra", "torch.float16"], id="mixed dtypes"),
    pytest.param(
        "model", _with(nn.Parameter(torch.ones(2).to(torch.int8), False)), ["extra", "torch.int8"], id="frozen integers"
    ),
    pytest.param(
        "model", _with(nn.Parameter(torch.ones(2, dtype=torch.complex64))), ["extra", "complex64"], id="complex weights"
    ),
    pytest.param("model", _with(nn.Parameter(torch.tensor(1.0))), ["extra has no dimension"], id="a scalar parameter"),
    pytest.param("model", _with(nn.Parameter(torch.ones(0, 3))), ["extra has no values"], id="an empty parameter"),
    pytest.param(
        "model", _with(nn.Parameter(torch.ones(3, 2).T)), ["extra", "dense contiguous"], id="a transposed parameter"
    ),
    pytest.param(
        "model", _with(nn.Parameter(torch.eye(2).to_sparse())), ["extra", "torch.sparse_coo"], id="a sparse parameter"
    ),
    pytest.param("model", nn.LazyLinear(3), ["weight", "has no shape yet"], id="a lazy model"),
    pytest.param("model", nn.Embedding(5, 3, sparse=True), ["Embedding has sparse=True"], id="sparse gradients"),
    pytest.param(
        "model",
        nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True, mode="sum")),
        ["0 has sparse=True"],
        id="sparse gradients of bags",
    ),
    pytest.param("model", _on_meta(_Bare), ["_Bare", "meta device", "give `init`"], id="nothing fills a meta model"),
]


@pytest.mark.parametrize(("argument", "value", "words"), ROWS)
def test_arguments_that_cannot_work_are_refused_before_the_model_is_touched(group, argument, value, words):
    model = _small()
    made_of_the_model = callable(value) and getattr(value, "__name__", "") == "<lambda>" and argument != "optimizer_cls"
    given = value(model) if made_of_the_model else value
    model = given if argument == "model" else model
    before = list(model.named_parameters()) if isinstance(model, nn.Module) else []
    arguments = {"optimizer_cls": torch.optim.SGD, "plan": plans.ddp(ONE), "lr": 0.1, "model": model} | {
        argument: given
    }
    refuses(lambda: ZeroOptimizer(**arguments), ValueError, *words)
    if isinstance(model, nn.Module):
        assert all(one is other for (_, one), (_, other) in zip(before, model.named_parameters(), strict=True))


def test_a_communicator_is_the_plans(group):
    same_size = Topology((Level("package", 1), Level("cluster", 1)))
    refuses(
        lambda: _wrapped(_small(), communicator=Communicator(same_size)),
        ValueError,
        "communicator.topology",
        "the plan",
    )
    refuses(lambda: _wrapped(_small(), communicator=Communicator(ONE), device="cuda"), ValueError, "device is 'cuda'")
    model = _small()
    assert _pass(model, _wrapped(model, communicator=Communicator(ONE), device="cpu")) > 0


def test_a_model_is_wrapped_once(group):
    model = _small()
    _wrapped(model)
    refuses(lambda: _wrapped(model), ValueError, "blocks.0.weight", "is sharded already")


class _Angles(nn.Module):
    """Resets its parameter, but has a buffer that only its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.arange(3.0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class _Filled(_Angles):
    """Writes through `.data`, as much code does, and has a place for what comes later."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("later", torch.empty(0))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.angles.data.copy_(torch.arange(3.0))


def test_a_buffer_on_the_meta_device_that_nobody_fills_is_named(group):
    refuses(
        lambda: _wrapped(_on_meta(_Angles)), ValueError, "_Angles.reset_parameters() leaves buffer angles as it was"
    )
    _wrapped(_on_meta(_Filled))
    filled = _on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    _wrapped(filled)
    assert filled[1].running_var.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.3, step_size_up=2),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_schedules_that_turn_the_momentum_too(group, schedule):
    model, reference = _small(), _small()
    optimizer = _wrapped(model, momentum=0.9)
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    schedules = schedule(optimizer), schedule(other)
    for _ in range(5):
        _pass(model, optimizer)
        reference(X).backward()
        other.step()
        other.zero_grad()
        for each in schedules:
            each.step()
        assert optimizer.param_groups[0]["momentum"] == other.param_groups[0]["momentum"]
    torch.testing.assert_close(model(X), reference(X))


def test_options_that_an_optimizer_does_not_have(group):
    model = _small()
    refuses(lambda: _wrapped(model, learning_rate=0.1), TypeError, "learning_rate")
    assert type(model.head.weight) is nn.Parameter


def _nested() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(3, 1))


UNUSUAL = [
    # a model, and what is given for it that works
    pytest.param(_small, lambda m: {"params": m.parameters()}, id="a generator of parameters"),
    pytest.param(
        _small, lambda m: {"params": [{"params": m.head.weight}, {"params": _but(m, m.head.weight)}]}, id="one"
    ),
    pytest.param(_small, lambda m: {"params": [*m.parameters(), m.head.bias]}, id="a parameter twice in its group"),
    pytest.param(
        lambda: _freeze(_small()), lambda m: {"params": m.parameters()}, id="frozen ones among the parameters"
    ),
    pytest.param(_small, lambda m: {"buckets": []}, id="no buckets"),
    pytest.param(_small, lambda m: {"buckets": m.blocks}, id="buckets from a ModuleList"),
    pytest.param(_small, lambda m: {"buckets": iter(m.blocks)}, id="a generator of buckets"),
    pytest.param(_nested, lambda m: {"buckets": [m[0][0], m[0]]}, id="a bucket in a bucket"),
    pytest.param(_small, lambda m: {"max_grad_norm": 10**6}, id="a limit that is an integer"),
    pytest.param(_small, lambda m: {"loss_scale": LossScale(8.0)}, id="a loss scale for fp32"),
    pytest.param(_small, lambda m: {"init": lambda module: None}, id="init for a model that is real"),
    pytest.param(lambda: _tied(_square()), lambda m: {}, id="a tie"),
    pytest.param(lambda: _with(nn.Parameter(torch.ones(5))), lambda m: {}, id="a parameter that no forward uses"),
    pytest.param(lambda: _with(torch.ones(5, dtype=torch.int8)), lambda m: {}, id="integer buffers"),
    pytest.param(lambda: _with(torch.ones(2, dtype=torch.complex64)), lambda m: {}, id="complex buffers"),
    pytest.param(lambda: _with(torch.ones(0)), lambda m: {}, id="an empty buffer"),
]


def _but(model: nn.Module, left_out: nn.Parameter) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter is not left_out]


def _freeze(model: Small) -> Small:
    model.blocks[0].requires_grad_(False)
    return model


def _square() -> Small:
    model = _small()
    model.head = nn.Linear(4, 4)
    return model


@pytest.mark.parametrize(("make", "more"), UNUSUAL)
def test_unusual_arguments_train_as_torch_does(group, make, more):
    model, expected = make(), make()
    expected.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(expected.parameters(), lr=0.1)
    optimizer = _wrapped(model, **more(model))
    for _ in range(2):
        expected(X).sum().backward()
        reference.step()
        reference.zero_grad()
        model(X).sum().backward()
        optimizer.step()
    torch.testing.assert_close(model(X), expected(X))


# --- the loss scale ---


@pytest.mark.parametrize(
    "value", [0, 0.0, -1, -(2.0**16), NAN, INF, -INF, 2.0**-25, 2.0**128, "65536", None, [1.0]], ids=repr
)
def test_a_loss_scale_is_a_positive_finite_number(value):
    refuses(lambda: LossScale(value), ValueError, "loss scale: initial is", repr(value), "a number from 2^-24 to 2^127")
    state = LossScale().state_dict() | {"value": value}
    refuses(lambda: LossScale().load_state_dict(state), ValueError, "loss scale: value is", repr(value))


@pytest.mark.parametrize("value", [0, -1, 2.5, NAN, INF, "2000", None], ids=repr)
def test_a_growth_interval_is_a_positive_integer(value):
    refuses(lambda: LossScale(growth_interval=value), ValueError, "growth_interval is", repr(value), "at least 1")


def test_a_loss_scale_neither_falls_to_zero_nor_grows_without_end():
    scale = LossScale(2.0, growth_interval=1)
    for _ in range(25):
        scale.update(False)
    assert scale.value == 2.0**-24
    refuses(lambda: scale.update(False), FloatingPointError, "gradients overflow even with a loss scale of", "26 steps")
    assert scale.value == 2.0**-24
    for _ in range(200):
        scale.update(True)
    assert scale.value == 2.0**127


def test_a_longer_run_without_an_overflow_than_the_interval_grows_the_scale():
    scale = LossScale(4.0, growth_interval=5)
    scale.load_state_dict({"value": 4.0, "good_steps": 1500, "skipped": 0})  # of one with an interval of 2000
    scale.update(finite=True)
    assert (scale.value, scale.good_steps) == (8.0, 0)


class _Other(Small):
    """Trains by a method of its own too."""

    def loss(self, x: Tensor) -> Tensor:
        return self.forward(x)


def test_gradients_that_no_loss_scale_reached_are_refused(group):
    model = _Other()
    optimizer = _wrapped(model, weight_dtype=torch.float16, loss_scale=LossScale(64.0))
    register_fsdp_forward_method(model, "loss")
    model.loss(X).backward()
    before = [master.clone() for master in optimizer.masters.flat]
    refuses(optimizer.step, RuntimeError, "no gradient entered through what a call of the model returned")
    assert all(map(torch.equal, before, optimizer.masters.flat))
    optimizer.zero_grad()
    assert _pass(model, optimizer) > 0


def test_a_model_that_is_not_finite_any_more_says_so_and_keeps_its_weights(group):
    model = _small()
    optimizer = _wrapped(model, weight_dtype=torch.float16, loss_scale=LossScale(2.0**-23))
    before = [master.clone() for master in optimizer.masters.flat]
    for number in range(2):
        (model(X) * INF).backward()
        if number:
            refuses(optimizer.step, FloatingPointError, "the loss or the weights are not finite")
        else:
            optimizer.step()
    assert all(map(torch.equal, before, optimizer.masters.flat))
    assert not optimizer.has_gradients
    assert _pass(model, optimizer) > 0  # the next batch may be finite


# --- what would be lost is refused ---


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda m, o: o.state_dict(), ["repro.zero.checkpoint.save"], id="state_dict"),
        pytest.param(lambda m, o: o.load_state_dict({}), ["repro.zero.checkpoint.load"], id="load_state_dict"),
        pytest.param(
            lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), ["constructor"], id="a new group"
        ),
        pytest.param(
            lambda m, o: o.add_param_group({"params": []}), ["add_param_group", "params"], id="an empty group"
        ),
    ],
)
def test_methods_of_an_optimizer_that_it_does_not_have(group, call, words):
    model = _small()
    optimizer = _wrapped(model)
    refuses(lambda: call(model, optimizer), NotImplementedError, *words)
    assert len(optimizer.param_groups) == 1
    assert _pass(model, optimizer) > 0


def _no_grad(write: Callable[[Any], object]) -> Callable[[Any], object]:
    return torch.no_grad()(write)


WRITES = [
    pytest.param(_no_grad(lambda m: m.blocks[0].weight.fill_(1.0)), "blocks.0.weight", id="fill_"),
    pytest.param(_no_grad(lambda m: m.head.bias.zero_()), "head.bias", id="zero_, in the root's bucket"),
    pytest.param(_no_grad(lambda m: m.blocks[1].bias.add_(1.0)), "blocks.1.bias", id="add_"),
    pytest.param(_no_grad(lambda m: m.blocks[1].weight.copy_(m.blocks[0].weight)), "blocks.1.weight", id="copy_"),
    pytest.param(lambda m: nn.init.zeros_(m.blocks[0].weight), "blocks.0.weight", id="nn.init"),
    pytest.param(lambda m: nn.init.uniform_(m.head.weight), "head.weight", id="nn.init, in the root's bucket"),
    pytest.param(lambda m: m.to(torch.float64), "blocks.0.weight", id="another dtype"),
    pytest.param(lambda m: m.bfloat16(), "blocks.0.weight", id="bfloat16()"),
]


@pytest.mark.parametrize("moment", ["at once", "after a step"])
@pytest.mark.parametrize(("write", "name"), WRITES)
def test_weights_written_into_the_model_are_noticed_at_the_next_forward(group, write, name, moment):
    model = _small()
    optimizer = _wrapped(model)
    if moment == "after a step":
        _pass(model, optimizer)
    write(model)
    refuses(lambda: model(X), RuntimeError, f"{name} was written to", "before the model is wrapped", "checkpoint.load")


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda m: m.blocks[0].weight.data.fill_(7.0), id="data"),
        pytest.param(_no_grad(lambda m: torch._foreach_mul_(list(m.parameters()), 7.0)), id="_foreach"),
    ],
)
def test_what_is_not_noticed_is_replaced_by_the_next_step(group, write):
    model = _small()
    optimizer = _wrapped(model)
    model(X).backward()
    write(model)
    optimizer.step()
    for bucket, master in zip(optimizer.buckets, optimizer.masters.flat, strict=True):
        assert torch.equal(bucket.sharded.read(), master)


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@pytest.mark.parametrize(
    "where", ["", "blocks.0", "head"], ids=["the model", "a bucket", "a part of the root's bucket"]
)
def test_a_state_dict_is_not_loaded_into_a_wrapped_model(group, where, assign):
    model = _small()
    saved = {name: value.clone() for name, value in model.get_submodule(where).state_dict().items()}
    optimizer = _wrapped(model)
    for _ in range(2):
        refuses(
            lambda: model.get_submodule(where).load_state_dict(saved, assign=assign),
            RuntimeError,
            "load_state_dict",
            "wrapped",
        )
        assert _pass(model, optimizer) > 0  # and nothing was lost


# --- state after what was refused, or went wrong ---


def _raising(places: list[str]) -> type[torch.optim.SGD]:
    class Raising(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step()  # the masters are new, or half of them
            if places:
                raise Survived("no more")

    return Raising


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda m, o: m(X), id="forward"),
        pytest.param(lambda m, o: o.step(), id="step"),
        pytest.param(lambda m, o: o.zero_grad(), id="zero_grad"),
        pytest.param(lambda m, o: o.has_gradients, id="save"),  # the first thing that `checkpoint.save` asks
    ],
)
def test_after_an_exception_within_step_nothing_goes_on(group, use):
    model, places = _small(), []
    optimizer = _wrapped(model, optimizer_cls=_raising(places))
    _pass(model, optimizer)
    model(X).backward()
    places.append("step")
    with pytest.raises(BrokenEngineError, match="step was ended by Survived: no more") as raised:
        optimizer.step()
    assert isinstance(raised.value.__cause__, Survived)
    places.clear()
    refuses(
        lambda: use(model, optimizer), BrokenEngineError, "step was ended by Survived: no more", "load a checkpoint"
    )


def _break(model: nn.Module, how: str) -> None:
    hook = model.blocks[0].register_forward_hook(lambda module, args, output: _Raises.apply(output))
    with pytest.raises(Survived):
        if how == "forward":
            hook.remove()
            hook = model.blocks[1].register_forward_pre_hook(lambda module, args: _raise())
            model(X)
        model(X).backward()
    hook.remove()


def _raise() -> None:
    raise Survived


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("use", ["step", "forward", "forward without gradients"])
def test_nobody_goes_on_without_zero_grad(group, use, how):
    model, reference = _small(), _small()
    optimizer, other = _wrapped(model), _wrapped(reference)
    model(X).backward()  # what was accumulated is incomplete as well
    _break(model, how)
    with torch.set_grad_enabled(use == "forward"):
        refuses(optimizer.step if use == "step" else lambda: model(X), RuntimeError, "call zero_grad() on all ranks")
    optimizer.zero_grad()
    assert not optimizer.has_gradients
    refuses(optimizer.step, RuntimeError, "step without a backward")
    assert _pass(model, optimizer) == _pass(reference, other)


def test_inference_mode_is_refused_and_training_goes_on(group):
    model, reference = _small(), _small()
    optimizer, other = _wrapped(model), _wrapped(reference)
    with torch.inference_mode():
        refuses(lambda: model(X), RuntimeError, "evaluate under torch.no_grad()")
    with torch.no_grad():
        assert torch.equal(model(X), reference(X))
    assert _pass(model, optimizer) == _pass(reference, other)


@pytest.mark.parametrize("passes", ["one graph", "two graphs"])
def test_two_backwards_add_up(group, passes):
    model, reference = _small(), _small()
    optimizer = _wrapped(model)
    loss = model(X)
    loss.backward(retain_graph=passes == "one graph")
    (loss if passes == "one graph" else model(X)).backward()
    (2 * reference(X)).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), INF).item()
    assert optimizer.step() == pytest.approx(norm, rel=1e-6)


def test_a_closure_is_refused_and_nothing_is_lost(group):
    model = _small()
    optimizer = _wrapped(model)
    model(X).backward()
    refuses(lambda: optimizer.step(lambda: 0.0), ValueError, "step takes no closure")
    assert optimizer.has_gradients and optimizer.step() > 0


# --- plans, levels and routes ---


def _plan(**changes: Any) -> Plan:
    ring = flat(FOUR)
    fields = {
        "name": "mine",
        "topology": FOUR,
        "weights": "package",
        "gradients": "package",
        "optimizer": "cluster",
        "weight_route": ring,
        "gradient_route": ring,
        "update_route": ring,
    }
    return Plan(**fields | changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *(
            pytest.param(lambda s=size: Level("node", s), ["'node'", repr(size), "at least 1"], id=f"level of {size!r}")
            for size in (0, -1, 2.5, NAN, INF, "2", None)
        ),
        *(
            pytest.param(lambda r=rate: Level("node", 2, r), ["'node'", "bandwidth"], id=f"bandwidth {rate!r}")
            for rate in (0, -1.0, NAN)
        ),
        pytest.param(lambda: Level("node", 2, 1.0, NAN), ["latency"], id="latency NaN"),
        pytest.param(lambda: plans.mics(FOUR, "rack"), ["'rack'", "package, node, cluster"], id="an unknown level"),
        *(
            pytest.param(lambda b=bits: plans.hierarchical(FOUR, weight_bits=b), [f"bits {bits}"], id=f"{bits} bits")
            for bits in (0, -8, 3, 7, 64)
        ),
        pytest.param(lambda: plans.hierarchical(FOUR, weight_bits=(8, 8)), ["bits for each"], id="bits of two levels"),
        *(
            pytest.param(
                lambda b=block: plans.hierarchical(FOUR, block=b),
                [f"block is {block!r}", "at least 1"],
                id=f"block {block!r}",
            )
            for block in (0, -256, 2.5, NAN, "256")
        ),
        pytest.param(lambda: Route((), ()), ["at least one level"], id="no hops"),
        pytest.param(lambda: Route(((),), (8,)), ["at least one level"], id="an empty hop"),
        pytest.param(
            lambda: _plan(gradients=None), ["gradients over nothing", "at least as wide"], id="gradients whole"
        ),
        pytest.param(lambda: _plan(optimizer=None), ["optimizer over nothing", "at least as wide"], id="masters whole"),
        pytest.param(
            lambda: _plan(weight_route=Route((("node", "package"), ("cluster",)), (8, 8))),
            ["in order"],
            id="a route back",
        ),
        pytest.param(
            lambda: _plan(update_route=Route((("package",),), (8,))), ["in order"], id="a route that ends early"
        ),
        pytest.param(
            lambda: replace(plans.zero3(FOUR), topology=Topology((Level("x", 4),))),
            ["'cluster'"],
            id="another topology",
        ),
    ],
)
def test_impossible_plans_are_refused(make, words):
    refuses(make, ValueError, *words)
