"""Fails loudly when torch changes what `zero/fsdp_private.py` relies on. Checked with torch 2.13."""

import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from repro.launch import launch
from repro.zero import fsdp_private


def test_signatures_of_custom_collectives():
    gather = list(inspect.signature(AllGather.__call__).parameters)
    reduce = list(inspect.signature(ReduceScatter.__call__).parameters)
    allocate = inspect.signature(AllGather.allocate).parameters
    assert gather == ["self", "output_tensor", "input_tensor", "group", "async_op"]
    assert reduce == ["self", "output_tensor", "input_tensor", "group", "op", "async_op"]
    assert list(allocate) == ["self", "size", "dtype", "device"]
    assert ReduceScatter.allocate is AllGather.allocate


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
    ],
)
def test_methods_of_a_sharded_module(name):
    assert callable(getattr(FSDPModule, name, None)), f"torch {torch.__version__}: FSDPModule.{name} is gone"


class _Net(nn.Module):
    """5 x 3 and 5 values over 2 ranks: 3 rows on rank 0, 2 rows and padding on rank 1. `frozen` and `unused` have no gradient."""

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
    seen: dict = {"gathers": 0, "hook": None}
    mesh = init_device_mesh("cpu", (world,))

    def gather(shard: torch.Tensor, full: torch.Tensor) -> None:
        seen["gathers"] += 1
        seen["shard is part of it"] = shard.data_ptr() == full.chunk(world)[rank].data_ptr()
        parts = [torch.empty_like(shard) for _ in range(world)]
        dist.all_gather(parts, shard)
        full.copy_(torch.cat(parts))

    def reduce(full: torch.Tensor) -> torch.Tensor:
        seen["reduce dtype"] = full.dtype
        full = full.clone()
        dist.all_reduce(full)
        return full.chunk(world)[rank]

    torch.manual_seed(0)
    model = _Net()
    bucket = fsdp_private.shard(model, mesh, torch.float32, gather, reduce)
    seen["read"], seen["numel"] = bucket.read().tolist(), bucket.numel
    seen["weight bytes"] = bucket.weight_bytes()
    bucket.on_gradient(lambda shard: seen.__setitem__("hook", shard.clone()))
    x = torch.ones(2, 3, requires_grad=True) * (rank + 1)
    first = model(x)
    first.sum().backward()
    seen["kept grads"] = [parameter.grad for parameter in model.parameters()]
    bucket.write(torch.zeros(bucket.numel))
    seen["after write"] = model(x).detach()
    return seen | {"first": first.detach()}


@pytest.fixture(scope="module")
def layout():
    return launch(_layout, 2, timeout_s=60)


def test_flat_layout_is_padded_shards_of_trainable_parameters_in_order(layout):
    assert layout[0]["read"] == [*range(9), 9, 9, 100, 101, 102]
    assert layout[1]["read"] == [*range(9, 15), 0, 0, 0, 9, 9, 103, 104, 0]
    assert layout[0]["numel"] == layout[1]["numel"] == 14
    assert layout[0]["weight bytes"] == 4 * (14 + 2)  # and one row of the frozen one


def test_the_hook_gets_the_sum_in_the_same_layout(layout):
    """d(sum)/d(weight) is the column sum of x: 2 on rank 0 plus 4 on rank 1; the unused parameter counts as zero."""
    assert layout[0]["hook"].tolist() == [6.0] * 9 + [0, 0] + [4.0] * 3
    assert layout[1]["hook"].tolist() == [6.0] * 6 + [0] * 3 + [0, 0] + [4.0, 4.0, 0]
    assert layout[0]["reduce dtype"] == torch.float32
    assert all(grad is None for grad in layout[0]["kept grads"])


def test_written_shards_are_what_the_next_forward_gathers(layout):
    weight, bias = torch.arange(15.0).view(5, 3), torch.arange(100.0, 105.0)
    torch.testing.assert_close(layout[0]["first"], torch.ones(2, 3) @ weight.T + bias + 28)
    assert (layout[1]["after write"] == 28).all()
    assert layout[0]["shard is part of it"] and layout[1]["shard is part of it"]
    assert layout[0]["gathers"] == 3  # forward, backward, forward: freed after each
