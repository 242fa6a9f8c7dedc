"""The only file that knows how FSDP2 (`fully_shard`) is built inside; its test fails when torch changes it.

Private parts of torch in use, as of 2.13:
- `fsdp._fully_shard._fsdp_api.AllGather` and `ReduceScatter`: base classes of custom collectives; `DefaultAllocMixin`
  has their memory. The all-gather gets its input as a view into its output, and may return a `Work` that FSDP waits for
  before it copies the weights out.
- `_set_unshard_async_op`: gathers return such a work. `FSDPParamGroup.wait_for_unshard`: wait for it; on a mesh of one
  rank (`_all_gather_process_group`), where nothing is gathered, this is where the shards are read.
- `_get_fsdp_state()._fsdp_param_groups[0].fsdp_params`: the parameters of one `fully_shard` call, in the order in which
  the flat reduce-scatter output holds their padded shards (those that require a gradient).
- `FSDPParam._sharded_param_data`: flat padded shard that every all-gather reads; `padded_sharded_param_size`: its
  shape; `sharded_param`: the parameter that the module shows, a DTensor split by rows; `_unsharded_param`: the gathered
  one, which collects the gradient of a backward. `FSDPModule.reset_iter_state` (public) forgets all but that gradient.
- `nn.Module._apply`, the way of `to`: FSDP2 overrides it and takes note of the parameters that are new.
- `_state_ctx.iter_forward_root` is set from the beginning of a forward to its end,
  `_state_ctx.post_backward_final_callback_queued` from the beginning of a backward to its end. `is_bw`: inside one?
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import is_bw

from repro.comm import Pending
from repro.zero.masters import Piece

# Flat shard, full tensor to fill in rank order (the shard is part of it); returns the collective, started.
Gather = Callable[[Tensor, Tensor], Pending]


class _CustomAllGather(DefaultAllocMixin, AllGather):
    def __init__(self, gather: Gather) -> None:
        self.gather = gather

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        pending = self.gather(input_tensor, output_tensor)
        if async_op:
            return pending
        pending.wait()
        return None


class _NoReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Sends nothing: keeps the gradient for the hook, which reduces it over all levels. FSDP's output stays undefined;
    it only becomes the `.grad` that is dropped."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM, "the engine divides by the world size itself, once"
        self.gradient = input_tensor

    def take(self, output: Tensor) -> Tensor:
        """The whole gradient; on a mesh of one rank, where no reduce-scatter is called, FSDP's output is just that."""
        gradient, self.gradient = output if self.gradient is None else self.gradient, None
        if gradient.is_cuda:
            # It is of FSDP's stream for reduce-scatters, which may use its memory again once FSDP and `_drop_grad` let
            # go of it: that is before it has been read on this one.
            gradient.record_stream(torch.cuda.current_stream())
        return gradient


class ShardedBucket:
    """One `fully_shard` call: parameters gathered and reduced together, as flat tensors in FSDP's own layout."""

    def __init__(self, module: FSDPModule, shard_index: int, reduction: _NoReduceScatter) -> None:
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

    def pieces(self, names: Mapping[int, str]) -> list[Piece]:
        """Layout of the flat shard of the trainable parameters, in order. Rows are a contiguous run of values.

        `names`: of the model's parameters, by id.
        """
        return self._layout(self._trainable, names)

    def frozen(self, names: Mapping[int, str]) -> list[tuple[Piece, Tensor]]:
        """The frozen parameters: where this rank's values belong, and the flat values with padding, no copy."""
        frozen = [param for param in self._params if not param.sharded_param.requires_grad]
        values = [param._sharded_param_data for param in frozen]
        return list(zip(self._layout(frozen, names), values, strict=True))

    def _layout(self, params: Sequence, names: Mapping[int, str]) -> list[Piece]:
        pieces, offset = [], 0
        for param in params:
            padded, total = param.padded_sharded_param_size.numel(), param.sharded_param.numel()
            start = min(self.shard_index * padded, total)
            pieces.append(Piece(names[id(param.sharded_param)], start, min(padded, total - start), offset, total))
            offset += padded
        return pieces

    def read(self) -> Tensor:
        """This rank's shard of the trainable weights, flat [numel], a copy."""
        return torch.cat([param._sharded_param_data for param in self._trainable])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Replace this rank's shard of the trainable weights by flat [numel or more], cast to their dtype. `discard`
        first: what is gathered stays as it is."""
        parts = flat[: self.numel].split([param.padded_sharded_param_size.numel() for param in self._trainable])
        for param, part in zip(self._trainable, parts, strict=True):
            param._sharded_param_data.copy_(part)

    def discard(self) -> None:
        """Free what was gathered by hand, or ahead for a forward that did not come."""
        for group in self.module._get_fsdp_state()._fsdp_param_groups:
            group.wait_for_unshard()
        self.module.reshard()

    @torch.no_grad()
    def copy_to(self, flat: Tensor) -> None:
        """Write this rank's shard into the input of a gather: frozen parameters too, in their order."""
        shards = [param._sharded_param_data for param in self._params]
        torch.cat(shards, out=flat)

    def before_read(self, hook: Callable[[], None]) -> None:
        """Call `hook` before FSDP computes with the shard itself, which it does where one rank has all weights. (On
        more ranks they are gathered.)"""
        for group in self.module._get_fsdp_state()._fsdp_param_groups:
            if group._all_gather_process_group.size() == 1:
                group.wait_for_unshard = _after(hook, group.wait_for_unshard)  # type: ignore[method-assign]

    def weight_bytes(self) -> int:
        """Bytes of this rank's shard, frozen parameters included."""
        return sum(param._sharded_param_data.nbytes for param in self._params)

    def forget(self) -> None:
        """Drop the gradients that a backward left which an exception ended."""
        self._reduction.gradient = None
        for param in self._trainable:
            param.sharded_param.grad = None
            if hasattr(param, "_unsharded_param"):  # there is none before the first gather
                param._unsharded_param.grad = None

    def on_gradient(self, hook: Callable[[Tensor], None]) -> None:
        """Call `hook` after each backward with this rank's whole gradient, flat in the layout of the gathered bucket;
        FSDP's own `.grad` is dropped at once."""
        self.module.set_all_reduce_hook(lambda output: hook(self._reduction.take(output)))
        for param in self._trainable:
            param.sharded_param.register_post_accumulate_grad_hook(_drop_grad)


def _after(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def shard(module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, gather: Gather) -> ShardedBucket:
    """`fully_shard` the parameters of `module` that no earlier call took, over `mesh`, gathered by `gather`.

    Weights are gathered before each forward and backward and freed after it. Weights stay in the dtype they have;
    computation, floating-point inputs and gradients are in `dtype`. RuntimeError for an older torch.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise RuntimeError(f"torch is {torch.__version__}: the engine needs FSDP2 of torch 2.13 or later")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    reduction = _NoReduceScatter()
    fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    assert isinstance(module, FSDPModule), "fully_shard changes the class of a module"
    module.set_custom_all_gather(_CustomAllGather(gather))
    module.set_custom_reduce_scatter(reduction)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    # A parameter without a gradient counts as zero: the flat layout must not depend on what a rank's batch used.
    module.set_reduce_scatter_unused_params(True, recurse=False)
    if mesh.device_type == "cpu":
        # On a GPU, streams let a gather run beside compute; here FSDP gets a handle to wait for when it needs weights.
        module._set_unshard_async_op(True)
    return ShardedBucket(module, mesh.get_local_rank(), reduction)


def cast(module: nn.Module, dtype: torch.dtype, buffer_dtype: torch.dtype | None) -> None:
    """Turn parameters, sharded or not, into `dtype`, and floating-point buffers into `buffer_dtype` (None: as they are)."""

    def wanted(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor.to(dtype)
        return tensor.to(buffer_dtype) if buffer_dtype and tensor.is_floating_point() else tensor

    module._apply(wanted)


def unfinished(root: nn.Module) -> bool:
    """Whether an exception left a forward or a backward of `root`, the whole model."""
    assert isinstance(root, FSDPModule)
    context = root._get_fsdp_state()._state_ctx
    return not is_bw() and (context.iter_forward_root is not None or context.post_backward_final_callback_queued)


def reset(root: nn.Module, buckets: Sequence[ShardedBucket]) -> None:
    """After such an exception: as before the forward. Waits for the gathers that are under way."""
    assert isinstance(root, FSDPModule)
    root.reset_iter_state()
    for bucket in buckets:
        bucket.forget()


def fetch_ahead(buckets: Sequence[ShardedBucket]) -> None:
    """Start gathering each bucket when the one before it in this order starts its forward. (In the backward FSDP does
    so by itself, in reverse.)"""
    for bucket, following in pairwise(buckets):
        bucket.module.set_modules_to_forward_prefetch([following.module])
