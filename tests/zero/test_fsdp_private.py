"""Fails loudly when torch changes what `zero/fsdp_private.py` relies on. Checked with torch 2.13."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPStateContext

from repro.comm import Pending
from repro.launch import launch
from repro.zero import fsdp_private


def test_an_older_torch_is_told_so(monkeypatch):
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(RuntimeError, match=r"torch is .*: the engine needs FSDP2 of torch 2\.13"):
        fsdp_private.shard(nn.Linear(2, 2), None, torch.float32, None)


def test_signatures_of_custom_collectives():
    gather = list(inspect.signature(AllGather.__call__).parameters)
    reduce = list(inspect.signature(ReduceScatter.__call__).parameters)
    allocate = inspect.signature(DefaultAllocMixin.allocate).parameters
    assert list(allocate) == ["self", "size", "dtype", "device"]
    assert gather == ["self", "output_tensor", "input_tensor", "group", "async_op"]
    assert reduce == ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]


@pytest.mark.parametrize(
    "name",
    [
        "set_custom_all_gather",
        "set_custom_reduce_scatter",
        "set_all_reduce_hook",
        "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
        "set_reduce_scatter_unused_params",
        "reshard",
        "_get_fsdp_state",
        "_set_unshard_async_op",
        "set_modules_to_forward_prefetch",
        "reset_iter_state",
    ],
)
def test_methods_of_a_sharded_module(name):
    assert callable(getattr(FSDPModule, name, None)), f"torch {torch.__version__}: FSDPModule.{name} is gone"


@pytest.mark.parametrize("name", ["iter_forward_root", "post_backward_final_callback_queued"])
def test_marks_of_a_pass_that_has_not_ended(name):
    assert hasattr(FSDPStateContext(), name), f"torch {torch.__version__}: {name} is gone"


class _Net(nn.Module):
    """5 x 3 and 5 values over 2 ranks: 3 rows on rank 0, 2 rows and padding on rank 1. `frozen` and `unused` have no
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.full((2, 2), 7.0), requires_grad=False)
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.unused = nn.Parameter(torch.full((4,), 9.0))
        self.bias = nn.Parameter(torch.arange(100.0, 105.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + self.bias + self.frozen.sum()


def _layout(rank: int, world: int) -> dict:
    """Everything the file assumes, observed on two ranks."""
    seen: dict = {"gathers": 0}
    mesh = init_device_mesh("cpu", (world,))

    def gathering(shard: torch.Tensor, full: torch.Tensor):
        seen["gathers"] += 1
        seen["shard is part of it"] = shard.data_ptr() == full.chunk(world)[rank].data_ptr()
        parts = [torch.empty_like(shard) for _ in range(world)]
        yield from ()
        dist.all_gather(parts, shard)
        full.copy_(torch.cat(parts))

    def hook(gradient: torch.Tensor) -> None:
        seen["gradient"] = gradient.clone()

    torch.manual_seed(0)
    model = _Net()
    bucket = fsdp_private.shard(model, mesh, torch.float32, lambda shard, full: Pending(gathering(shard, full)))
    seen["read"], seen["numel"] = bucket.read().tolist(), bucket.numel
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen["pieces"] = [(p.name, p.start, p.numel, p.offset, p.total) for p in bucket.pieces(names)]
    seen["frozen"] = [(p.start, p.numel, values.tolist()) for p, values in bucket.frozen(names)]
    seen["weight bytes"] = bucket.weight_bytes()
    bucket.on_gradient(hook)
    x = torch.ones(2, 3, requires_grad=True) * (rank + 1)
    first = model(x)
    first.sum().backward()
    seen["kept grads"] = [parameter.grad for parameter in model.parameters()]
    bucket.write(torch.zeros(bucket.numel))
    seen["after write"] = model(x).detach()
    model.unshard()  # not waited for: what it gathers must not survive
    bucket.discard()
    bucket.write(torch.ones(bucket.numel))
    seen["after a second write"] = model(x).detach()
    return seen | {"first": first.detach()}


@pytest.fixture(scope="module")
def layout():
    return launch(_layout, 2, timeout_s=60)


def test_flat_layout_is_padded_shards_of_trainable_parameters_in_order(layout):
    assert layout[0]["read"] == [*range(9), 9, 9, 100, 101, 102]
    assert layout[1]["read"] == [*range(9, 15), 0, 0, 0, 9, 9, 103, 104, 0]
    assert layout[0]["numel"] == layout[1]["numel"] == 14
    assert layout[0]["weight bytes"] == 4 * (14 + 2)  # and one row of the frozen one


def test_pieces_say_where_the_values_of_a_shard_belong(layout):
    """Name, start in the parameter, values, offset in the shard, values of the whole parameter."""
    assert layout[0]["pieces"] == [("weight", 0, 9, 0, 15), ("unused", 0, 2, 9, 4), ("bias", 0, 3, 11, 5)]
    assert layout[1]["pieces"] == [("weight", 9, 6, 0, 15), ("unused", 2, 2, 9, 4), ("bias", 3, 2, 11, 5)]
    assert layout[0]["frozen"] == [(0, 2, [7, 7])] and layout[1]["frozen"] == [(2, 2, [7, 7])]


def test_the_hook_gets_the_whole_gradient_in_the_layout_of_the_gathered_bucket(layout):
    """d(sum)/d(weight) is the column sum of x, 2 on rank 0 and 4 on rank 1; the unused parameter counts as zero."""
    for rank, value in ((0, 2.0), (1, 4.0)):
        first = [value] * 9 + [0, 0] + [2.0] * 3  # the bias is added to 2 rows
        second = [value] * 6 + [0] * 3 + [0, 0] + [2.0, 2.0, 0]
        assert layout[rank]["gradient"].tolist() == first + second
        assert all(grad is None for grad in layout[rank]["kept grads"])


def test_written_shards_are_what_the_next_forward_gathers(layout):
    weight, bias = torch.arange(15.0).view(5, 3), torch.arange(100.0, 105.0)
    torch.testing.assert_close(layout[0]["first"], torch.ones(2, 3) @ weight.T + bias + 28)
    assert (layout[1]["after write"] == 28).all()
    assert layout[0]["shard is part of it"] and layout[1]["shard is part of it"]
    assert (layout[0]["after a second write"] == 1 * 3 + 1 + 28).all()  # row of ones, bias, frozen
    assert layout[0]["gathers"] == 5  # forward, backward, forward, by hand, forward: freed after each
