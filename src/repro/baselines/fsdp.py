"""PyTorch's FSDP2 (`fully_shard`) as it comes: ZeRO-3, HSDP, and ZeRO-3 with secondary shards in the node.

    fsdp2           weights, gradients, optimizer over all ranks (ZeRO-3)
    hsdp            all three over the ranks of a node, replicated in every node (MiCS), which all-reduce the gradients
    fsdp2_reshard   as fsdp2, and a forward leaves each block spread over the node, where its backward gathers it (hpZ)

Parameters stay fp32 and sharded: they are the masters. With `dtype` bfloat16 (`MixedPrecisionPolicy.param_dtype`) they
are cast before each all-gather, and computation, gathers and reductions are 16 bits wide; gradient shards are fp32.
With Adam's moments that is 16 bytes per parameter, as our engine holds (2 + 12 + 2).

On gloo, `reduce_scatter` is an all-reduce inside, and so moves twice the bytes that NCCL or RCCL would.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from repro.baselines import trainer
from repro.topology import Topology
from repro.zero.buckets import blocks
from repro.zero.materialise import default_device, materialise


class FSDPTrainer(trainer.Trainer):
    """`model`: the sharded module, an `FSDPModule`; `optimizer`: torch's AdamW on its shards.

    In `held_bytes`, `weights` are the fp32 masters and `optimizer` only the moments. The shard that `fsdp2_reshard`
    keeps in the node is not counted: FSDP has dropped it by the end of the backward.
    """

    def __init__(self, model: nn.Module, training: trainer.Training, device: str) -> None:
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.max_grad_norm = training.max_grad_norm
        super().__init__(model, torch.optim.AdamW(self.trained, **training.adamw), device)

    def _backward(self, loss: torch.Tensor, last: bool) -> None:
        self.model.set_requires_all_reduce(last)  # with HSDP, nodes exchange gradients once per step
        loss.backward()

    def _count(self) -> dict[str, int]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "weights": trainer.nbytes(self.model.parameters()),
            "gradients": trainer.nbytes(parameter.grad for parameter in self.trained),
            "optimizer": trainer.nbytes(states),
        }

    def _update(self) -> None:
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fsdp2(model: nn.Module, topology: Topology, training: trainer.Training) -> FSDPTrainer:
    """Shard `model` in place over all ranks of the default process group, which are those of `topology`.

    model       fp32, on the device that is trained on, with equal weights on every rank: FSDP2 sends none, so different
                ones would be mixed. Checked. On the meta device: every rank makes one block after the other real

    The members of the outermost `nn.ModuleList`s are gathered one at a time; the root takes what is left (embeddings,
    output layer) and keeps it gathered from forward to backward, the library's default. ValueError for a model,
    topology or dtype that does not fit.
    """
    return _shard(model, topology, training, (topology.world_size,))


def hsdp(model: nn.Module, topology: Topology, training: trainer.Training) -> FSDPTrainer:
    """Arguments of `fsdp2`. ValueError for a topology that has not several nodes of several ranks."""
    return _shard(model, topology, training, trainer.nodes_and_ranks(topology))


def fsdp2_reshard(model: nn.Module, topology: Topology, training: trainer.Training) -> FSDPTrainer:
    """Arguments of `fsdp2`. ValueError for a topology that has not several nodes of several ranks."""
    _, ranks = trainer.nodes_and_ranks(topology)
    return _shard(model, topology, training, (topology.world_size,), reshard_after_forward=ranks)


def _shard(
    model: nn.Module,
    topology: Topology,
    training: trainer.Training,
    mesh_shape: tuple[int, ...],
    reshard_after_forward: bool | int = True,
) -> FSDPTrainer:
    """`mesh_shape`: replicas of a partition if any, then its ranks, which are numbered innermost first."""
    trainer.check(model, topology, training.dtype)
    device = default_device(model)
    mesh = init_device_mesh(device, mesh_shape, mesh_dim_names=("replicated", "sharded")[-len(mesh_shape) :])
    policy = MixedPrecisionPolicy(param_dtype=training.dtype, reduce_dtype=training.dtype)
    for module in (*blocks(model), model):
        materialise(module, device, training.init)
        _check_equal_weights(module)
        # Of the root it says nothing: FSDP keeps that gathered until the backward anyway.
        reshard = None if module is model else reshard_after_forward
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    return FSDPTrainer(model, training, device)


def _check_equal_weights(module: nn.Module) -> None:
    """ValueError on every rank when the sum of some tensor that is not sharded yet is not that of rank 0."""
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers()) if not isinstance(tensor, DTensor)]
    sums: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums, [tensor.detach().double().sum().item() for tensor in tensors])
    if differing := sum(found != sums[0] for found in sums):
        raise ValueError(f"{differing} ranks have other weights than rank 0: FSDP2 sends none, use one seed")
