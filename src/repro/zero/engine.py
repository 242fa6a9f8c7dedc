"""Train a model with its states partitioned over the levels of a machine: the idea of arXiv 2501.04266, generalised.

Three kinds of state, three partitions, and four moments at which data moves between them (plan.hierarchical in brackets):

    before a layer's forward and backward   gather its weights from the ranks that share them        [GCD pair, 200 GB/s]
    after a layer's backward                reduce its gradient to the weight partition, then on
                                            to the gradient partition, and add it up there           [node, 50 GB/s]
    step, first half                        reduce the sum to the optimizer partition                [cluster, 12.5 GB/s]
    step, second half                       update the masters, send the new weights back            [cluster and node]

So everything inside the layer loop stays on fast links, and slow links are used once per step, whatever the number of
micro-batches. ZeRO-3 is the plan that puts all three partitions over the cluster: every moment crosses the slow link.

FSDP2 owns the first moment and half of the second (its collectives are replaced, `fsdp_private.py`); the rest is here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from repro.comm import Ledger, Links
from repro.zero import fsdp_private
from repro.zero.optimizer import ShardedOptimizer
from repro.zero.plan import Plan


class Bucket:
    """Parameters that travel together (a transformer block): FSDP's shard of them, and what this rank keeps beside it."""

    sharded: fsdp_private.ShardedBucket
    gradient: Tensor | None = None  # sum since the last step, this rank's part of the gradient partition
    copy: Tensor | None = (
        None  # this rank's part of the secondary copy, from the first gather after a step to the next step
    )


class ZeroEngine:
    """A drop-in for DistributedDataParallel and an optimizer:

        engine = ZeroEngine(model, plan, torch.optim.AdamW, lr=1e-3)
        loss = engine(tokens, targets); loss.backward(); engine.step()

    Call `backward` several times before `step` to accumulate micro-batches (scale the loss by their number, as usual).

    model            the same module on every rank, fp32, with its final initial weights (a checkpoint is loaded before): it is
                     sharded in place, and its parameters and floating-point buffers become `weight_dtype`
    plan             which state over which level, see `repro.zero.plan`; the default process group must have its ranks
    optimizer_cls    elementwise torch optimizer, built with `options` (lr, ...) on flat fp32 masters
    buckets          modules to gather as a whole; default: the members of the model's outermost `nn.ModuleList`s. A weight that
                     two of them share is refused by FSDP: list a module that holds both instead
    weight_dtype     float32 or bfloat16; float16 would need loss scaling, which is not built: ValueError
    gradient_dtype   of the sums kept between backward and step
    max_grad_norm    clip to this global norm
    ledger           counts the bytes of every step by level; `engine.ledger` when left out
    broadcast        send rank 0's parameters and buffers to all first, as DDP does; False when the same seed made them equal
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        buckets: Sequence[nn.Module] | None = None,
        weight_dtype: torch.dtype = torch.bfloat16,
        gradient_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        ledger: Ledger | None = None,
        device: str = "cpu",
        broadcast: bool = True,
        **options: Any,
    ) -> None:
        _check(model, weight_dtype)
        self.model, self.plan = model, plan
        self.weight_dtype, self.gradient_dtype, self.max_grad_norm = weight_dtype, gradient_dtype, max_grad_norm
        self.links = Links(plan.topology, ledger, device)
        self.ledger = self.links.ledger
        if broadcast:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, src=0)
        self.all_buckets = self._shard(_default_buckets(model) if buckets is None else buckets)
        self.buckets = [bucket for bucket in self.all_buckets if bucket.sharded.numel]  # those that are trained
        # The masters keep the fp32 values; only then do the weights become 16 bits wide.
        self.optimizer = ShardedOptimizer([self._master(b) for b in self.buckets], optimizer_cls, options)
        model.to(weight_dtype)
        for bucket in self.buckets:
            bucket.sharded.on_gradient(partial(self._accumulate, bucket))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    # --- weights: FSDP asks for a bucket's before its forward and before its backward ---

    def _shard(self, modules: Sequence[nn.Module]) -> list[Bucket]:
        mesh = self.links.mesh(self.plan.levels(None, self.plan.weights))
        buckets = []
        for module in (*modules, self.model):  # the root takes what is left: embeddings, output layer
            bucket = Bucket()
            gather = partial(self._gather, bucket)
            bucket.sharded = fsdp_private.shard(module, mesh, self.weight_dtype, gather, self._reduce)
            buckets.append(bucket)
        return buckets

    def _gather(self, bucket: Bucket, shard: Tensor) -> Tensor:
        """The whole bucket from its shards; from the secondary copy, which is closer, once there is one (hpZ of ZeRO++)."""
        plan = self.plan
        if bucket.copy is not None:
            return self.links.all_gather(bucket.copy, plan.secondary_route.within(plan.levels(None, plan.secondary)))
        full = self.links.all_gather(shard, plan.weight_route.within(plan.levels(None, plan.weights)))
        if plan.keeps_copy:
            ranks = plan.degree(plan.secondary)
            bucket.copy = full.view(ranks, -1)[dist.get_rank() % ranks].clone()
        return full

    # --- gradients: after the backward of a bucket, from everywhere to the gradient partition ---

    def _reduce(self, gradient: Tensor) -> Tensor:
        plan = self.plan
        return self.links.reduce_scatter(gradient, plan.gradient_route.within(plan.levels(None, plan.weights)))

    def _accumulate(self, bucket: Bucket, shard: Tensor) -> None:
        """`shard`: fp32 sum over the ranks of a weight partition, this rank's part of the bucket."""
        plan = self.plan
        route = plan.gradient_route.within(plan.levels(plan.weights, plan.gradients))
        gradient = self.links.reduce_scatter(self._padded(shard), route)
        if plan.reduce_across == "micro_batch":
            gradient = self._reduce_across(gradient)
        if bucket.gradient is None:
            bucket.gradient = gradient.to(self.gradient_dtype)
        else:
            bucket.gradient += gradient

    def _reduce_across(self, gradient: Tensor) -> Tensor:
        """From the gradient partition to the optimizer's, and to the sum over all ranks where that is not the whole machine."""
        plan = self.plan
        route = plan.gradient_route
        shard = self.links.reduce_scatter(gradient, route.within(plan.levels(plan.gradients, plan.optimizer)))
        return self.links.all_reduce(shard, route.within(plan.levels(plan.optimizer, plan.topology.names[-1])))

    # --- step: to the optimizer partition, update there, and the new weights back ---

    @torch.no_grad()
    def step(self) -> float:
        """Update with the gradients of all backward calls since the last step; returns their global norm before clipping.

        The gradient is the mean over ranks of the accumulated sums. RuntimeError when there was no backward.
        """
        if any(bucket.gradient is None for bucket in self.buckets):
            raise RuntimeError("step without a backward since the last one: there are no gradients")
        plan = self.plan
        means = []
        for bucket in self.buckets:
            gradient = bucket.gradient.float()
            if plan.reduce_across == "step":
                gradient = self._reduce_across(gradient)
            means.append(gradient.div_(plan.topology.world_size))
        self.zero_grad()
        others = self.links.mesh(plan.levels(None, plan.optimizer)).get_group() if plan.optimizer else None
        norm = self.optimizer.update(means, others, self.max_grad_norm)
        for bucket, master in zip(self.buckets, self.optimizer.masters, strict=True):
            bucket.sharded.write(self._updated(master)[: bucket.sharded.numel])
            bucket.copy = None  # it holds the old weights
        return norm.item()

    def zero_grad(self) -> None:
        """Drop the accumulated gradients (`step` has done so already)."""
        for bucket in self.buckets:
            bucket.gradient = None

    def _master(self, bucket: Bucket) -> Tensor:
        """This rank's part of the bucket, fp32: the chunk that the two reductions above leave it with."""
        plan, rank = self.plan, dist.get_rank()
        inside, across = self._splits()
        mine = rank // plan.degree(plan.weights) % inside, rank // plan.degree(plan.gradients) % across
        return self._padded(bucket.sharded.read()).view(inside, across, -1)[mine].clone()

    def _updated(self, master: Tensor) -> Tensor:
        """All new weights of the rank's weight partition, from the optimizer partition."""
        plan = self.plan
        route = plan.update_route.within(plan.levels(plan.weights, plan.optimizer))
        in_rank_order = self.links.all_gather(master.detach().to(self.weight_dtype), route)
        inside, across = self._splits()
        return in_rank_order.view(across, inside, -1).transpose(0, 1).reshape(-1)

    def _splits(self) -> tuple[int, int]:
        """Chunks of a weight shard per gradient partition, and of those per optimizer partition."""
        weights, gradients, optimizer = (
            self.plan.degree(level) for level in (self.plan.weights, self.plan.gradients, self.plan.optimizer)
        )
        return gradients // weights, optimizer // gradients

    def _padded(self, shard: Tensor) -> Tensor:
        inside, across = self._splits()
        missing = -shard.numel() % (inside * across)
        return F.pad(shard, (0, missing)) if missing else shard

    def held_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank right now, by kind. Gradients exist from backward to step, a secondary copy from forward
        to step: look then."""
        return {
            "weights": sum(bucket.sharded.weight_bytes() for bucket in self.all_buckets),
            "secondary": sum(bucket.copy.nbytes for bucket in self.all_buckets if bucket.copy is not None),
            "gradients": sum(bucket.gradient.nbytes for bucket in self.buckets if bucket.gradient is not None),
            "optimizer": self.optimizer.held_bytes(),
        }


def _default_buckets(model: nn.Module) -> list[nn.Module]:
    """Members of the outermost `nn.ModuleList`s."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _default_buckets(child)
    return found


def _check(model: nn.Module, weight_dtype: torch.dtype) -> None:
    if weight_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"weight_dtype is {weight_dtype}, allowed: torch.float32, torch.bfloat16")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"parameter {name} is {parameter.dtype}: the masters need fp32 values to start from")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no parameter that requires a gradient")
