"""The only file that knows how FSDP2 (`fully_shard`) is built inside; tests/zero/test_fsdp_private.py fails when torch changes it.

Private parts of torch in use, as of 2.13:
- `fsdp._fully_shard._fsdp_api.AllGather` and `ReduceScatter`: base classes of custom collectives. The all-gather gets its
  input as a view into its output; nothing reads the reduce-scatter's output but the `.grad` that is dropped.
- `_get_fsdp_state()._fsdp_param_groups[0].fsdp_params`: the parameters of one `fully_shard` call, in the order in which the
  flat reduce-scatter output holds their padded shards (those that require a gradient).
- `FSDPParam._sharded_param_data`: flat padded shard that every all-gather reads; `padded_sharded_param_size`: its shape;
  `sharded_param`: the parameter that the module shows, a DTensor split by rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

Gather = Callable[[Tensor, Tensor], None]  # flat shard, full tensor to fill in rank order; the shard is part of it
Reduce = Callable[[Tensor], Tensor]  # full flat gradient -> fp32 sum of the own chunk


class _Allocate:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CustomAllGather(_Allocate, AllGather):
    def __init__(self, gather: Gather) -> None:
        self.gather = gather

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.gather(input_tensor, output_tensor)


class _CustomReduceScatter(_Allocate, ReduceScatter):
    """Keeps the sum for the hook instead of giving it to FSDP, whose buffer has the gradients' own, 16-bit dtype."""

    def __init__(self, reduce: Reduce) -> None:
        self.reduce = reduce
        self.total: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "the engine divides by the world size itself, once"
        self.total = self.reduce(input_tensor)

    def take(self, output: Tensor) -> Tensor:
        """The sum; FSDP's `output` on a mesh of one rank, where no collective is called."""
        total, self.total = self.total, None
        return output.float() if total is None else total


@dataclass(frozen=True)
class Piece:
    """What this rank's shard of a bucket holds of one parameter: `numel` of its values from flat position `start` on, found at
    `offset` of the shard, where they take `padded` places."""

    param: nn.Parameter
    start: int
    numel: int
    offset: int
    padded: int


class ShardedBucket:
    """One `fully_shard` call: parameters that are gathered and reduced together, as flat tensors in FSDP's own layout."""

    def __init__(self, module: FSDPModule, shard_index: int, reduction: _CustomReduceScatter) -> None:
        self.module, self.shard_index, self._reduction = module, shard_index, reduction

    @property
    def _params(self) -> list:
        groups = self.module._get_fsdp_state()._fsdp_param_groups
        return list(groups[0].fsdp_params) if groups else []  # a root whose children took all parameters has none

    @property
    def _trainable(self) -> list:
        return [param for param in self._params if param.sharded_param.requires_grad]

    @property
    def numel(self) -> int:
        """Values in this rank's shard of the trainable parameters, padding included."""
        return sum(param.padded_sharded_param_size.numel() for param in self._trainable)

    def pieces(self) -> list[Piece]:
        """Layout of the flat shard of the trainable parameters, in order. A shard of rows is a contiguous run of values."""
        return self._layout(self._trainable)

    def frozen(self) -> list[tuple[Piece, Tensor]]:
        """The frozen parameters: where this rank's values belong, and the values, flat [padded], not a copy."""
        frozen = [param for param in self._params if not param.sharded_param.requires_grad]
        return [(piece, param._sharded_param_data) for piece, param in zip(self._layout(frozen), frozen, strict=True)]

    def _layout(self, params: Sequence) -> list[Piece]:
        pieces, offset = [], 0
        for param in params:
            padded, total = param.padded_sharded_param_size.numel(), param.sharded_param.numel()
            start = min(self.shard_index * padded, total)
            pieces.append(Piece(param.sharded_param, start, min(padded, total - start), offset, padded))
            offset += padded
        return pieces

    def read(self) -> Tensor:
        """This rank's shard of the trainable weights, flat [numel], a copy."""
        return torch.cat([param._sharded_param_data for param in self._trainable])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Replace this rank's shard of the trainable weights by flat [numel or more], cast to their dtype."""
        self.module.reshard()  # weights gathered by hand (`unshard`) would survive otherwise
        parts = flat[: self.numel].split([param.padded_sharded_param_size.numel() for param in self._trainable])
        for param, part in zip(self._trainable, parts, strict=True):
            param._sharded_param_data.copy_(part)

    def weight_bytes(self) -> int:
        """Bytes of this rank's shard, frozen parameters included."""
        return sum(param._sharded_param_data.nbytes for param in self._params)

    def on_gradient(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` with the reduced fp32 shard [numel] after each backward; FSDP's own `.grad` is dropped at once."""
        self.module.set_all_reduce_hook(lambda output: hook(self._reduction.take(output)))
        for param in self._trainable:
            param.sharded_param.register_post_accumulate_grad_hook(_drop_grad)


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, gather: Gather, reduce: Reduce) -> ShardedBucket:
    """`fully_shard` the parameters of `module` that no earlier call took, over `mesh`, with the given collectives.

    Weights are gathered before each forward and backward and freed after it. Weights stay in the dtype they have; computation,
    floating-point inputs and what `reduce` gets are in `dtype`.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    reduction = _CustomReduceScatter(reduce)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    module.set_custom_all_gather(_CustomAllGather(gather))
    module.set_custom_reduce_scatter(reduction)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # A parameter without a gradient counts as zero: the flat layout must not depend on what a rank's batch used.
    module.set_reduce_scatter_unused_params(True, recurse=False)
    return ShardedBucket(module, mesh.get_local_rank(), reduction)
