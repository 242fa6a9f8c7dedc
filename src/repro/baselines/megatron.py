"""NVIDIA's Megatron-FSDP (package `megatron-fsdp`) with `outer_dp_sharding_strategy="optim"`: HFSDP, our plan `hfsdp`.

Weights and gradients are spread over the ranks of a node, optimizer states over all ranks. Per micro-batch gathers and
reductions stay in the node; once per step gradients are reduced between the nodes, and new weights come back.

The model computes in `dtype`, and the library's fp32 masters start from weights of that width. It runs on CUDA only.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from repro.baselines import trainer
from repro.topology import Topology
from repro.zero.buckets import blocks
from repro.zero.materialise import default_device


class MegatronTrainer(trainer.Trainer):
    """`model`: a `MegatronFSDP`; `optimizer`: torch's AdamW on its shards."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, device: str) -> None:
        self.trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.max_grad_norm = max_grad_norm
        super().__init__(model, optimizer, device)

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        self.model.is_last_microbatch = last  # only then gradients are reduced between nodes
        loss.backward()
        if last:
            self.model.finish_grad_sync()

    def _count(self) -> dict[str, int]:
        """Of buffers that stay; `weights` are those that are computed with, `optimizer` masters and moments."""
        groups = self.model.param_and_grad_buffer.parameter_groups
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        masters = sum(group.main_weight_buffer.data.nbytes for group in groups)
        return {
            "weights": sum(group.hfsdp_helper_wbuf.data.nbytes for group in groups),
            "gradients": sum(group.hfsdp_helper_gbuf.data.nbytes for group in groups),
            "optimizer": masters + trainer.nbytes(moments),
        }

    def _update(self) -> None:
        if self.max_grad_norm is not None:
            self._clip(self.max_grad_norm)
        step: Any = self.optimizer.step  # the library's, which takes more arguments than torch's
        step(sync_grad_before_optimizer_step=False)  # done in the last backward: clipping needs the gradients
        self.optimizer.zero_grad()

    def _clip(self, to: float) -> None:
        """By the norm over all ranks. Each holds an uneven part of every gradient, of which torch's norm does not know."""
        mine = self._gradients()
        norm = torch.zeros((), device=self.device)
        norm += sum(part.float().square().sum() for part in mine)
        dist.all_reduce(norm)
        torch._foreach_mul_(mine, (to / (norm.sqrt() + 1e-6)).clamp(max=1.0))

    def _gradients(self) -> list[torch.Tensor]:
        """This rank's parts."""
        found = (parameter.grad for parameter in self.trained)
        return [each.to_local() if isinstance(each, DTensor) else each for each in found if each is not None]


def hfsdp(model: nn.Module, topology: Topology, training: trainer.Training) -> MegatronTrainer:
    """Shard `model`, with equal weights on every rank, over the default process group, whose ranks are those of `topology`.

    model   fp32; on the meta device: every rank makes its shards, module by module, with the same seed

    ValueError for a model, topology or dtype that does not fit, and without a GPU; ImportError without the package.
    """
    trainer.check(model, topology, training.dtype)
    nodes, ranks = trainer.nodes_and_ranks(topology)
    device = default_device(model)
    _require_cuda(device)
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

    mesh = init_device_mesh(device, (nodes, ranks, 1), mesh_dim_names=("nodes", "ranks", "tensor"))
    gathers, _ = dist.new_subgroups(ranks)  # of their own, so that gathers and reductions run beside each other
    meta = next(model.parameters()).is_meta
    if meta:
        _made_by(model, training)
    sharded = fully_shard_model(
        model.to(training.dtype),
        mesh,
        dp_shard_dim="ranks",
        dp_outer_dim="nodes",
        tp_dim="tensor",
        hybrid_fsdp_group=mesh["nodes", "ranks"]._flatten("all").get_group(),
        fsdp_group_ag=gathers,
        fsdp_unit_modules=list({type(block) for block in blocks(model)}),
        zero_dp_strategy="optim_grads_params",
        outer_dp_sharding_strategy="optim",
        init_model_with_meta_device=meta,
        mixed_precision_policy=MixedPrecisionPolicy(
            main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=training.dtype
        ),
        sync_model_each_microbatch=False,
    )
    for group in sharded.param_and_grad_buffer.parameter_groups:
        # 0.6.1 leaves it out: gradients would be summed over the ranks, not averaged (tests/baselines/test_megatron.py).
        group.hfsdp_helper_gbuf.gradient_scaling_factor = 1 / topology.world_size
    # The library makes Adam's states by a step without gradients: at a rate of 0, and not counted, it changes nothing.
    optimizer = torch.optim.AdamW(sharded.parameters(), **training.adamw)
    rate = optimizer.defaults["lr"]
    optimizer.param_groups[0]["lr"] = 0.0
    fully_shard_optimizer(optimizer)
    optimizer.param_groups[0]["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
    return MegatronTrainer(sharded, optimizer, training.max_grad_norm, device)


def _require_cuda(device: str) -> None:
    if device != "cuda":
        raise ValueError(f"Megatron-FSDP needs CUDA, found device {device}")


def _made_by(model: nn.Module, training: trainer.Training) -> None:
    """Have Megatron-FSDP, which calls a module's `reset_parameters`, fill parameters of the meta device by `training.init`."""

    def fill(module: nn.Module) -> None:
        del module.__dict__["reset_parameters"]  # `init` may call the module's own
        assert training.init is not None
        training.init(module)

    for module in model.modules():
        if training.init is not None and next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters = partial(fill, module)
