"""Train a model with its states partitioned over the levels of a machine: the idea of arXiv 2501.04266, generalised.

Three kinds of state, three partitions, and four moments at which data moves between them (brackets: plan.hierarchical):

    before a layer's forward and backward   gather its weights from the ranks that share them    [GCD pair, 200 GB/s]
    after a layer's backward                reduce its gradient to the weight partition, then on
                                            to the gradient partition, and add it up there       [node, 50 GB/s]
    step, first half                        reduce the sum to the optimizer partition            [cluster, 12.5 GB/s]
    step, second half                       update the masters, send the new weights back        [cluster and node]

So everything inside the layer loop stays on fast links, and slow links are used once per step, whatever the number of
micro-batches. ZeRO-3 is the plan that puts all three partitions over the cluster: every moment crosses the slow link.

FSDP2 owns the first moment and half of the second (its collectives are replaced, `fsdp_private.py`); the rest is here.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from repro.comm import Communicator, ExchangeError, Pending, pipelined
from repro.comm.exchange import Steps, Works
from repro.zero import arguments, fsdp_private
from repro.zero.buckets import broadcast_from_first, default_buckets, default_device, materialise
from repro.zero.loss_scale import LossScale
from repro.zero.masters import Masters, Piece, global_norm, parameter_groups, require_elementwise, within
from repro.zero.plan import Plan

# What a message is about, together with its bucket.
_GATHER, _REDUCE, _AVERAGE, _PUBLISH = range(4)


class BrokenEngineError(RuntimeError):
    """The engine is of no further use: what an exception left is not the same on all ranks, or half an update. Make a
    process group, a model and an optimizer anew (in new processes, best), and go on from a checkpoint."""


class Bucket:
    """Parameters that travel together (a transformer block): FSDP's shard, and what this rank keeps beside it."""

    sharded: fsdp_private.ShardedBucket
    gradient: Tensor | None = None  # sum since the last step, this rank's part of the gradient partition
    secondary: Tensor | None = None  # this rank's secondary shard, from the first gather after a step to the next
    spent: bool = False  # the secondary shard is of a pass before zero_grad: good for a backward, not for a forward

    def __init__(self, number: int) -> None:
        self.number = number


class ZeroOptimizer(torch.optim.Optimizer):
    """Shards a model by a plan and trains it with any elementwise torch optimizer. The training loop stays as it is:

        optimizer = ZeroOptimizer(model, plan, torch.optim.AdamW, lr=3e-4)
        for tokens, targets in batches:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The gradient is the mean over ranks, as with DistributedDataParallel. Several backward passes before `step`
    accumulate (divide the loss by their number, as usual). Learning-rate schedules work on `param_groups`.

    model            the same module on every rank, fp32, with its final initial weights: it is sharded in place, and
                     its parameters and floating-point buffers become `weight_dtype`. On the meta device: every rank
                     makes one bucket after the other real with `init`, so the model never exists as a whole
    plan             which state over which level, see `repro.zero.plan`; the default process group must have its ranks
    optimizer_cls    elementwise torch optimizer, built with `options` (lr, ...) on flat fp32 masters
    params           parameters or parameter groups as for any torch optimizer; default: all that require a gradient
    buckets          modules to gather as a whole; default: members of the model's outermost `nn.ModuleList`s, without
                     those that share a weight with another module
    weight_dtype     float32, bfloat16, or float16 with loss scaling
    gradient_dtype   of the sums kept between backward and step
    max_grad_norm    clip to this global norm; `clip_grad_norm_` cannot: gradients are not on the parameters
    loss_scale       for float16; a `LossScale` with other settings than the default
    init             for a model on the meta device: fills the parameters that a submodule itself holds; default: its
                     `reset_parameters()`. Must draw the same on all ranks, or `broadcast`
    communicator     process groups and the ledger of bytes, to share them between optimizers; default: new ones
    device           "cpu" or "cuda"; default: where the model is, and CUDA or CPU for one on the meta device
    broadcast        send rank 0's parameters and buffers to all first, as DDP does; not needed if they are equal

    Raises ValueError that names the argument, before the model is changed, for what cannot be trained this way; errors
    of `optimizer_cls` about its options are its own.

    The masters are the weights. Set those of the model before it is wrapped, or by `checkpoint.load`: afterwards
    `load_state_dict` of the model and of its modules raises RuntimeError, and so does the first forward after a
    parameter was written to in place. (What is written through `parameter.data` or `torch._foreach_*`, and a parameter
    that is put in a module, is not noticed; `step` replaces it.)

    An exception in a forward or backward may be survived: call `zero_grad`, and the engine is as after the last step.
    One rank alone cannot: `zero_grad` then raises BrokenEngineError there, and the others get an ExchangeError or the
    same, after the timeout of their process group at the latest. After an exception in the midst of `step`, in which
    an update may be half done, every use raises BrokenEngineError.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        *,
        buckets: Iterable[nn.Module] | None = None,
        weight_dtype: torch.dtype = torch.bfloat16,
        gradient_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        init: Callable[[nn.Module], None] | None = None,
        communicator: Communicator | None = None,
        device: str | None = None,
        broadcast: bool = True,
        **options: Any,
    ) -> None:
        buckets = list(buckets) if isinstance(buckets, Iterable) else buckets
        arguments.check(
            model,
            plan,
            buckets,
            init,
            weight_dtype=weight_dtype,
            gradient_dtype=gradient_dtype,
            max_grad_norm=max_grad_norm,
            loss_scale=loss_scale,
            communicator=communicator,
            device=device,
            broadcast=broadcast,
        )
        groups, group_of = parameter_groups(model, params)
        require_elementwise(optimizer_cls, groups, options)
        self.model, self.plan = model, plan
        self.weight_dtype, self.gradient_dtype, self.max_grad_norm = weight_dtype, gradient_dtype, max_grad_norm
        self.communicator = communicator or Communicator(plan.topology, device=device or default_device(model))
        self.ledger = self.communicator.ledger
        # All groups now: making them is a collective of its own, and a backward is no place for it.
        for route in vars(plan.moves).values():
            self.communicator.hops(route)
        of_optimizer = plan.levels(None, plan.optimizer)
        self.norm_group = self.communicator.mesh(of_optimizer).get_group() if of_optimizer else None
        sharing = self.communicator.mesh(plan.levels(None, plan.weights))
        self._broken = ""  # why this engine is of no further use
        self._complete = False
        self._order: list[Bucket] = []  # in which the first forward gathered them
        self._fetches_ahead = False
        self._under_way: Pending | None = None  # the reduction that was started last
        self.all_buckets: list[Bucket] = []  # frozen ones too
        self.buckets: list[Bucket] = []  # those that are trained
        masters = []
        for module in (*(default_buckets(model) if buckets is None else buckets), model):
            # The root comes last and takes what is left: embeddings, output layer.
            materialise(module, self.communicator.device, init)
            if broadcast:
                broadcast_from_first(module)
            self.all_buckets.append(bucket := Bucket(len(self.all_buckets)))
            bucket.sharded = fsdp_private.shard(module, sharing, weight_dtype, partial(self._gather, bucket))
            if bucket.sharded.numel:
                self.buckets.append(bucket)
                masters.append(self._master(bucket))
            module.to(weight_dtype)  # only now: the masters keep the fp32 values
        pieces = [self._pieces(bucket) for bucket in self.buckets]
        self.masters = Masters(masters, pieces, optimizer_cls, groups, group_of, options)
        super().__init__(self.masters.inner.param_groups, {})  # the same dictionaries: a schedule changes both
        self._complete = True
        self._guard()
        for bucket in self.buckets:
            bucket.sharded.on_gradient(partial(self._reduce, bucket))
        self.loss_scale = loss_scale or (LossScale() if weight_dtype == torch.float16 else None)
        if self.loss_scale:
            self.loss_scale.attach(model)

    # --- weights: FSDP asks for a bucket's before its forward and before its backward, one bucket ahead ---

    def _gather(self, bucket: Bucket, shard: Tensor, full: Tensor) -> Pending:
        if bucket not in self._order:
            self._order.append(bucket)
        return Pending(self._labelled(_GATHER, bucket, self._gathering(bucket, shard, full)))

    def _labelled(self, kind: int, bucket: Bucket, steps: Generator[Works, None, Any]) -> Generator[Works, None, Any]:
        """So that a rank which is elsewhere since an exception makes others wait, and does not send them wrong values."""
        return self.communicator.labelled(4 * bucket.number + kind, steps)

    def _gathering(self, bucket: Bucket, shard: Tensor, full: Tensor) -> Steps:
        """The whole bucket from its shards, or from the secondary shards, which are closer (hpZ of ZeRO++)."""
        plan = self.plan
        if bucket.secondary is not None and (fsdp_private.is_bw() or not bucket.spent):
            return (yield from self.communicator.gathering(bucket.secondary, plan.moves.gather_secondary, full))
        yield from self.communicator.gathering(shard, plan.moves.gather_weights, full)
        if plan.has_secondary:
            ranks = plan.degree(plan.secondary)
            bucket.secondary, bucket.spent = full.view(ranks, -1)[dist.get_rank() % ranks].clone(), False
        return full

    # --- gradients: after the backward of a bucket, from everywhere to the gradient partition ---

    def _reduce(self, bucket: Bucket, gradient: Tensor) -> None:
        """Start reducing a bucket's gradient. It travels during the next bucket's backward."""
        if not self._fetches_ahead:
            fsdp_private.fetch_ahead([bucket.sharded for bucket in self._order])
            self._fetches_ahead = True
        self._settle()
        self._under_way = Pending(self._labelled(_REDUCE, bucket, self._reducing(bucket, gradient)))

    def _settle(self) -> None:
        """Finish the reduction that is under way."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def _reducing(self, bucket: Bucket, gradient: Tensor) -> Generator[Works, None, None]:
        moves = self.plan.moves
        shard = yield from self.communicator.reducing(gradient, moves.reduce_to_weights)
        total = yield from self.communicator.reducing(self._padded(shard), moves.reduce_to_gradients)
        if self.plan.reduce_across == "micro_batch":
            total = yield from self._reducing_across(total)
        if bucket.gradient is None:
            bucket.gradient = total.to(self.gradient_dtype)
        else:
            bucket.gradient += total

    def _reducing_across(self, gradient: Tensor) -> Steps:
        """From the gradient partition to the optimizer's, then the sum over all ranks if that is not the whole machine.

        With the hierarchical plan a gradient leaves its node here, and only here: once per step.
        """
        shard = yield from self.communicator.reducing(gradient, self.plan.moves.reduce_to_optimizer)
        return (yield from self.communicator.all_reducing(shard, self.plan.moves.all_reduce_replicas))

    # --- step: to the optimizer partition, update there, and the new weights back ---

    @torch.no_grad()
    def step(self, closure: None = None) -> float:  # type: ignore[override]  # torch's returns None without a closure
        """Update with the gradients since the last step; returns their global norm before clipping.

        Gradients that overflowed (float16) leave the weights as they are and lower the loss scale; the norm is then not
        finite. RuntimeError, and nothing is changed, when there was no backward or an exception ended one; ValueError
        for a closure, which would have to run on all ranks; BrokenEngineError, from then on, for an exception in it;
        FloatingPointError, and the weights stay, when the loss scale cannot be lowered any further.
        """
        if closure is not None:
            raise ValueError("step takes no closure")
        self._require_sound()
        if not self.has_gradients:
            raise RuntimeError("step without a backward since the last one: there are no gradients")
        with self._to_the_end("step"):
            self._settle()
            means = pipelined(self._labelled(_AVERAGE, bucket, self._averaging(bucket)) for bucket in self.buckets)
            self.zero_grad()
            present = [mean for mean in means if mean is not None]
            norm = global_norm(present, self.norm_group)
        if self.loss_scale:
            self.loss_scale.update(finite := bool(norm.isfinite()))
            if not finite:
                return norm.item()
        with self._to_the_end("step"):
            if self.max_grad_norm is not None:
                torch._foreach_mul_(present, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self.masters.update(means)
            self.publish()
        return norm.item()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients (`step` has done so already).

        After an exception in a forward or backward this is what makes the engine as it was after the last step; all
        ranks must call it. BrokenEngineError when they did not leave the pass at the same place.
        """
        self._require_usable()
        if fsdp_private.unfinished(self.model):
            with self._to_the_end("zero_grad after an exception in a forward or backward"):
                self._recover()
        self._settle()
        for bucket in self.all_buckets:
            bucket.gradient, bucket.spent = None, True

    @property
    def has_gradients(self) -> bool:
        """Whether there was a backward since the last step. BrokenEngineError where that does not matter any more."""
        self._require_usable()
        return self._under_way is not None or any(bucket.gradient is not None for bucket in self.buckets)

    def publish(self) -> None:
        """Make the masters the weights of the model, on all ranks (`step` does)."""
        pipelined(
            self._labelled(_PUBLISH, bucket, self._publishing(bucket, master))
            for bucket, master in zip(self.buckets, self.masters.flat, strict=True)
        )

    def _averaging(self, bucket: Bucket) -> Generator[Works, None, Tensor | None]:
        """Mean over ranks of a bucket's accumulated gradient, fp32, this rank's part of the optimizer partition; None
        when no backward reached it."""
        if bucket.gradient is None:
            return None
        gradient = bucket.gradient.float()
        if self.plan.reduce_across == "step":
            gradient = yield from self._reducing_across(gradient)
        return gradient.div_(self.plan.topology.world_size * (self.loss_scale.value if self.loss_scale else 1))

    def _publishing(self, bucket: Bucket, master: Tensor) -> Generator[Works, None, None]:
        """All new weights of the rank's weight partition, from the optimizer partition."""
        updated = yield from self.communicator.gathering(master.to(self.weight_dtype), self.plan.moves.gather_updated)
        gradient_parts, optimizer_parts = splits(self.plan)
        in_rank_order = updated.view(optimizer_parts, gradient_parts, -1)
        bucket.sharded.write(in_rank_order.transpose(0, 1).reshape(-1))
        bucket.secondary = None  # it holds the old weights

    # --- exceptions ---

    def _recover(self) -> None:
        """Forget a forward or backward that an exception ended. What is under way arrives only if all ranks left it at
        the same place; that is asked first, and costs nothing where there was no exception."""
        rounds = [0] * dist.get_world_size()
        dist.all_gather_object(rounds, self.communicator.position)
        if len(set(rounds)) > 1:
            raise ExchangeError(f"the ranks left it at different places, after {rounds} rounds of messages")
        self._settle()
        fsdp_private.reset(self.model, [bucket.sharded for bucket in self.all_buckets])

    @contextmanager
    def _to_the_end(self, what: str) -> Iterator[None]:
        """An exception in this block ends the use of the engine."""
        try:
            yield
        except BaseException as error:
            self._broken = f"{what} was ended by {type(error).__name__}: {error}"
            if isinstance(error, Exception):
                self._require_usable(error)
            raise

    def _require_usable(self, cause: Exception | None = None) -> None:
        if self._broken:
            raise BrokenEngineError(
                f"{self._broken}. The engine cannot go on: make a new process group, model and optimizer, and load a "
                "checkpoint"
            ) from cause

    def _require_sound(self, *forward: object) -> None:
        """Before a forward and before a step."""
        self._require_usable()
        if fsdp_private.unfinished(self.model):
            raise RuntimeError(
                "an exception ended a forward or backward; before going on, call zero_grad() on all ranks"
            )
        for name, parameter, version in self._versions:
            if parameter._version != version or parameter.dtype != self.weight_dtype:
                raise RuntimeError(
                    f"{name} was written to, but a model's weights are the masters of its ZeroOptimizer, which would "
                    "replace them at the next step: set weights before the model is wrapped, or by checkpoint.load"
                )

    def _guard(self) -> None:
        """Refuse what would be lost, and passes after one that failed."""
        self._versions = [(name, parameter, parameter._version) for name, parameter in self.model.named_parameters()]
        self.model.register_forward_pre_hook(self._require_sound, prepend=True)  # before FSDP's
        for module in self.model.modules():
            module.register_load_state_dict_pre_hook(_refuse_to_load)

    # --- which values of a bucket are this rank's ---

    def _padded(self, shard: Tensor) -> Tensor:
        missing = -shard.numel() % math.prod(splits(self.plan))
        return F.pad(shard, (0, missing)) if missing else shard

    def _master(self, bucket: Bucket) -> Tensor:
        """This rank's part of the bucket, fp32."""
        chunks = self._padded(bucket.sharded.read()).view(math.prod(splits(self.plan)), -1)
        return chunks[own_chunk(self.plan, dist.get_rank())].clone()

    def _pieces(self, bucket: Bucket) -> list[Piece]:
        """What the master holds of which parameter."""
        numel = -(-bucket.sharded.numel // math.prod(splits(self.plan)))
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return within(bucket.sharded.pieces(names), own_chunk(self.plan, dist.get_rank()) * numel, numel)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank right now, by kind. Gradients exist from backward to step, secondary shards from
        forward to step: look then."""
        self._settle()
        return {
            "weights": sum(bucket.sharded.weight_bytes() for bucket in self.all_buckets),
            "secondary": sum(bucket.secondary.nbytes for bucket in self.all_buckets if bucket.secondary is not None),
            "gradients": sum(bucket.gradient.nbytes for bucket in self.buckets if bucket.gradient is not None),
            "optimizer": self.masters.held_bytes(),
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the masters are cut where the group changes."""
        if self._complete:
            raise NotImplementedError("add_param_group: give all parameter groups to the constructor, as `params`")
        super().add_param_group(param_group)  # torch's constructor calls this

    def state_dict(self) -> dict[str, Any]:
        """Refused: a rank has only its part. `repro.zero.checkpoint` saves and restores the whole."""
        raise NotImplementedError("state_dict() would hold this rank's part only: use repro.zero.checkpoint.save")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as `state_dict`."""
        raise NotImplementedError("use repro.zero.checkpoint.load")


# --- the arithmetic of chunks ---


def splits(plan: Plan) -> tuple[int, int]:
    """Gradient parts of a weight shard, and optimizer parts of a gradient part; their product is its chunks."""
    weights, gradients, optimizer = (plan.degree(level) for level in (plan.weights, plan.gradients, plan.optimizer))
    return gradients // weights, optimizer // gradients


def own_chunk(plan: Plan, rank: int) -> int:
    """Number of the chunk of its weight shard that `rank` updates, counted from the shard's first.

    Worked example: the hierarchical plan on 2 nodes of 2 packages of 2 GCDs. `splits` is (2, 2), so a weight shard has
    4 chunks, and a bucket, which is the shards of a package's 2 GCDs, has chunks 0 to 7. A rank's at the four moments:

        rank   node, package, GCD   weights   after package   after node   after cluster   arrive as
        0      0, 0, 0              0 1 2 3   0 1 2 3         0 1          0               0 2 1 3
        1      0, 0, 1              4 5 6 7   4 5 6 7         4 5          4               4 6 5 7
        2      0, 1, 0              0 1 2 3   0 1 2 3         2 3          2               0 2 1 3
        3      0, 1, 1              4 5 6 7   4 5 6 7         6 7          6               4 6 5 7
        4      1, 0, 0              0 1 2 3   0 1 2 3         0 1          1               0 2 1 3
        5      1, 0, 1              4 5 6 7   4 5 6 7         4 5          5               4 6 5 7
        6      1, 1, 0              0 1 2 3   0 1 2 3         2 3          3               0 2 1 3
        7      1, 1, 1              4 5 6 7   4 5 6 7         6 7          7               4 6 5 7

    weights          before a forward or backward, the shard that it gives to its package
    after package    of a gradient, after the reduce-scatter in the package, `moves.reduce_to_weights`
    after node       and after that between the packages of the node, `moves.reduce_to_gradients`; accumulated here
    after cluster    in `step`, after the reduce-scatter between nodes, `moves.reduce_to_optimizer`; updated here
    arrive as        the new weights, gathered from nodes and packages in rank order; `_publishing` sorts the chunks
    """
    gradient_parts, optimizer_parts = splits(plan)
    gradient_part = rank // plan.degree(plan.weights) % gradient_parts
    return gradient_part * optimizer_parts + rank // plan.degree(plan.gradients) % optimizer_parts


def _refuse_to_load(*_: object) -> None:
    raise RuntimeError(
        "load_state_dict of a model that a ZeroOptimizer has wrapped: its masters would replace these weights at the "
        "next step; load them before the model is wrapped, or use checkpoint.load"
    )
