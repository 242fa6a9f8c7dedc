"""Train a model with its states partitioned over the levels of a machine: the idea of arXiv 2501.04266, generalised.

Three kinds of state, three partitions, and four moments at which data moves between them (brackets: plan.hierarchical):

    before a layer's forward and backward   gather its weights from the ranks that share them    [GCD pair, 200 GB/s]
    after a layer's backward                reduce its gradient to the weight partition, then on
                                            to the gradient partition, and add it up there       [node, 50 GB/s]
    step, first half                        reduce the sum to the optimizer partition            [cluster, 12.5 GB/s]
    step, second half                       update the masters, send the new weights back        [cluster and node]

So everything inside the layer loop stays on fast links, and slow links are used once per step, whatever the number of
micro-batches. ZeRO-3 is the plan that puts all three partitions over the cluster: every moment crosses the slow link.

Each moment has a stream (`comm.Stream`) on which bucket follows bucket from level to level, and the streams run beside
each other and beside the computation:

    gathers         of the next layer, while this one computes
    reductions      of this layer, while the one before it computes
    averages        of this layer between nodes, while those of earlier layers are reduced inside: the slow level works
                    during the last backward, if the engine knows that it is the last (`accumulation`, `no_sync`)
    publications    of later layers' new weights, while the first layers of the next forward run on theirs

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

from repro.comm import Communicator, ExchangeError, Pending
from repro.comm.exchange import Round, Steps
from repro.zero import arguments, fsdp_private, names
from repro.zero.buckets import default_buckets
from repro.zero.chunks import own_chunk, splits
from repro.zero.guard import BrokenEngineError, Guard
from repro.zero.loss_scale import LossScale
from repro.zero.masters import Masters, Piece, global_norm, parameter_groups, require_elementwise, within
from repro.zero.materialise import broadcast_from_first, default_device, materialise
from repro.zero.plan import Plan

__all__ = ["KINDS", "BrokenEngineError", "Bucket", "ZeroOptimizer"]

# Kinds of messages: all-gather of weights; reduction to the gradient partition; reduction from there to the optimizer
# partition; all-gather of updated weights. The label of a message is 4 * bucket + kind.
KINDS = ("gather", "reduce", "average", "publish")


class Bucket:
    """Parameters that travel together (a transformer block): FSDP's shard, and what this rank keeps beside it."""

    sharded: fsdp_private.ShardedBucket
    gradient: Tensor | None = None  # sum of backward passes, this rank's part of the gradient partition
    summed_bytes: int = 0  # of that, also after it has left
    total: Tensor | None = None  # what of the sum has arrived in the optimizer partition, fp32
    backwards: int = 0  # passes since the last step
    reduction: Pending | None = None  # of the last pass; its result is the sum
    average: Pending | None = None  # of what has left last
    kept: bool = False  # there is something in the sum that has not left
    publication: Pending | None = None  # of the weights that the last step has made
    stale: bool = False  # FSDP may have copied the shard before these arrived
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
                     its parameters become `weight_dtype`. On the meta device: every rank makes one bucket after the
                     other real with `init`, so the model never exists as a whole
    plan             which state over which level, see `repro.zero.plan`; as many ranks as the default process group
    optimizer_cls    elementwise torch optimizer, built with `options` (lr, ...) on flat fp32 masters
    params           parameters or parameter groups as for any torch optimizer, without names; default: all that
                     require a gradient
    buckets          modules to gather as a whole; default: members of the model's outermost `nn.ModuleList`s, without
                     those that share a weight with another module
    weight_dtype     float32, bfloat16, or float16 with loss scaling: of computation, and of floating-point inputs of
                     each bucket. What is sent is the plan's choice: named plans send at most 16 bits a value, so for
                     float32 throughout wrap the plan, `plan.unquantised(plan)`
    buffer_dtype     of floating-point buffers; None: as they are, as FSDP2 has it (rotary frequencies stay exact)
    gradient_dtype   of the sums kept between backward and step
    max_grad_norm    clip to this global norm; `clip_grad_norm_` cannot: gradients are not on the parameters
    loss_scale       for float16, in place of `torch.amp.GradScaler` (whose `step` finds no gradients); a `LossScale`
                     with other settings than the default
    init             for a model on the meta device: fills the parameters and buffers that a submodule itself holds;
                     default: its `reset_parameters()`. Must draw the same on all ranks, or `broadcast`
    communicator     process groups and the ledger of bytes, to share them between optimizers; default: new ones
    device           "cpu" or "cuda", the current device of the rank (`torch.cuda.set_device`); default: where the model
                     is, with a warning where that leaves a GPU idle, and CUDA or CPU for one on the meta device
    broadcast        send rank 0's parameters and buffers to all first, as DDP does; not needed if they are equal
    accumulation     backward passes in a step, if all have as many: then a sum leaves for the optimizer partition as
                     soon as its last gradient is in, and not in `step`; `no_sync` says so pass by pass
    late_weights     `step` returns when the masters are new; weights arrive during the next forward. False: it waits

    Raises ValueError that names the argument, before the model is changed, for what cannot be trained this way; errors
    of `optimizer_cls` about its options are its own. Two errors come later, and the model must then be made anew:
    ValueError when `reset_parameters()` leaves a buffer of the meta device unfilled, RuntimeError before torch 2.13.

    The masters are the weights. Set those of the model before it is wrapped, or by `checkpoint.load`: afterwards
    `load_state_dict` of the model and of its modules raises RuntimeError, and so does the next forward or step after a
    parameter was written to in place or its `requires_grad` changed. (What is written through `parameter.data` or
    `torch._foreach_*`, and a parameter that is put in a module, is not noticed; `step` replaces it.)

    After `step` a forward waits for the weights it needs, layer by layer; `state_dict` of the model waits for all. Who
    reads a parameter directly (`parameter.to_local()`) calls `synchronize` first, or trains without `late_weights`.

    With `accumulation=N` a bucket's sum leaves in the N-th backward since the last step. With `no_sync`, used as in DDP
    around all passes but the last, it leaves in the backward outside of the block. The result is the same either way.
    `step` sends what has not left: all sums where neither is used; else those of buckets without a gradient in the last
    pass, of a step with fewer passes than N, and of passes after the N-th (which cost their messages once more).
    `zero_grad` drops what has left like the rest.

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
        buffer_dtype: torch.dtype | None = None,
        gradient_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        loss_scale: LossScale | None = None,
        init: Callable[[nn.Module], None] | None = None,
        communicator: Communicator | None = None,
        device: str | None = None,
        broadcast: bool = True,
        accumulation: int | None = None,
        late_weights: bool = True,
        **options: Any,
    ) -> None:
        buckets = list(buckets) if isinstance(buckets, Iterable) else buckets
        arguments.check(
            model,
            plan,
            buckets,
            init,
            weight_dtype=weight_dtype,
            buffer_dtype=buffer_dtype,
            gradient_dtype=gradient_dtype,
            max_grad_norm=max_grad_norm,
            loss_scale=loss_scale,
            communicator=communicator,
            device=device,
            broadcast=broadcast,
            accumulation=accumulation,
            late_weights=late_weights,
        )
        groups, group_of = parameter_groups(model, params)
        require_elementwise(optimizer_cls, groups, options)
        self.model, self.plan = model, plan
        self.weight_dtype, self.gradient_dtype, self.max_grad_norm = weight_dtype, gradient_dtype, max_grad_norm
        self.communicator = communicator or Communicator(plan.topology, device=device or default_device(model))
        self.ledger = self.communicator.ledger
        self.accumulation, self.late_weights = accumulation, late_weights
        # All groups now: making them is a collective of its own, and a backward is no place for it.
        moves, stream = plan.moves, self.communicator.stream
        across = (moves.reduce_to_optimizer, moves.all_reduce_replicas)
        at_once = plan.reduce_across == "micro_batch"
        self.gathers = stream(moves.gather_weights, moves.gather_secondary)
        self.reductions = stream(moves.reduce_to_weights, moves.reduce_to_gradients, *(across if at_once else ()))
        self.averages = stream(*(() if at_once else across))
        self.publications = stream(moves.gather_updated)
        of_optimizer = plan.levels(None, plan.optimizer)
        self.norm_group = self.communicator.mesh(of_optimizer).get_group() if of_optimizer else None
        sharing = self.communicator.mesh(plan.levels(None, plan.weights))
        self._complete = False
        self._order: list[Bucket] = []  # in which the first forward gathered them
        self._fetches_ahead = False
        self._more_passes = self._told = False  # inside of `no_sync`; it was used since the last step
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
            fsdp_private.cast(module, weight_dtype, buffer_dtype)  # only now: the masters keep the fp32 values
        pieces = [self._pieces(bucket) for bucket in self.buckets]
        self.masters = Masters(masters, pieces, optimizer_cls, groups, group_of, options)
        inner = self.masters.inner  # the same dictionaries: a schedule changes both, and some look at the defaults
        super().__init__(inner.param_groups, inner.defaults)
        self._complete = True
        self._guard = Guard(model, weight_dtype)
        # Before FSDP's hook.
        model.register_forward_pre_hook(lambda *_: self._require(self._guard.require_sound), prepend=True)
        for module in model.modules():
            module.register_state_dict_pre_hook(lambda *_: self.synchronize())
        for bucket in self.buckets:
            bucket.sharded.on_gradient(partial(self._reduce, bucket))
            bucket.sharded.before_read(partial(_arrived, bucket))
        self.loss_scale = loss_scale or (LossScale() if weight_dtype == torch.float16 else None)
        if self.loss_scale:
            self.loss_scale.attach(model)

    # --- weights: FSDP asks for a bucket's before its forward and before its backward, one bucket ahead ---

    def _gather(self, bucket: Bucket, shard: Tensor, full: Tensor) -> Pending:
        if bucket not in self._order:
            self._order.append(bucket)
        usable = fsdp_private.is_bw() or not bucket.spent
        secondary, stale = bucket.secondary if usable else None, bucket.stale
        bucket.stale = False
        return self.gathers.start(self._labelled(0, bucket, self._gathering(bucket, shard, full, secondary, stale)))

    def _labelled(self, kind: int, bucket: Bucket, steps: Generator[Round, None, Any]) -> Generator[Round, None, Any]:
        """So that a rank which is elsewhere since an exception makes others wait, and does not send them wrong values."""
        return self.communicator.labelled(4 * bucket.number + kind, steps)

    def _gathering(self, bucket: Bucket, shard: Tensor, full: Tensor, secondary: Tensor | None, stale: bool) -> Steps:
        """The whole bucket from its shards, or from the secondary shards, which are closer (hpZ of ZeRO++)."""
        plan = self.plan
        if secondary is not None:
            return (yield from self.communicator.gathering(secondary, plan.moves.gather_secondary, full))
        if stale:
            _arrived(bucket)
            bucket.sharded.copy_to(shard)
        yield from self.communicator.gathering(shard, plan.moves.gather_weights, full)
        if plan.has_secondary:
            ranks = plan.degree(plan.secondary)
            bucket.secondary, bucket.spent = full.view(ranks, -1)[dist.get_rank() % ranks].clone(), False
        return full

    # --- gradients: after the backward of a bucket, from everywhere to the gradient partition ---

    def _reduce(self, bucket: Bucket, gradient: Tensor) -> None:
        """Start reducing a bucket's gradient. It travels during the next buckets' backward."""
        if not self._fetches_ahead:
            fsdp_private.fetch_ahead([bucket.sharded for bucket in self._order])
            self._fetches_ahead = True
        bucket.backwards += 1
        last = not self._more_passes and (self._told or bucket.backwards == self.accumulation)
        leaves = last and self.plan.sums_travel
        self.reductions.make_room()
        steps = self._reducing(bucket, gradient, bucket.reduction, leaves)
        bucket.reduction, bucket.kept = self.reductions.start(self._labelled(1, bucket, steps)), True
        if leaves:
            self._leave(bucket)

    def _reducing(self, bucket: Bucket, gradient: Tensor, earlier: Pending | None, leaves: bool) -> Steps:
        """The bucket's sum, this rank's part of the gradient partition. If it leaves, the next pass begins another."""
        moves = self.plan.moves
        shard = yield from self.communicator.reducing(gradient, moves.reduce_to_weights)
        del gradient
        total = yield from self.communicator.reducing(self._padded(shard), moves.reduce_to_gradients)
        if self.plan.reduce_across == "micro_batch":
            total = yield from self._reducing_across(total)
        if earlier is not None:
            earlier.wait()
        summed = total.to(self.gradient_dtype) if bucket.gradient is None else bucket.gradient.add_(total)
        bucket.gradient, bucket.summed_bytes = None if leaves else summed, summed.nbytes
        return summed

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backward passes of a step that are not its last: their gradients stay in the gradient partition."""
        before, self._more_passes, self._told = self._more_passes, True, True
        try:
            yield
        finally:
            self._more_passes = before

    # --- the sum: once per step, to the optimizer partition ---

    def _leave(self, bucket: Bucket) -> None:
        """Start sending a bucket's sum on, as soon as the reduction that is under way has made it."""
        assert bucket.reduction is not None, "what has been reduced"
        steps = self._leaving(bucket, bucket.reduction, bucket.average)
        bucket.average, bucket.kept = self.averages.start(self._labelled(2, bucket, steps)), False

    def _leaving(self, bucket: Bucket, reduction: Pending, earlier: Pending | None) -> Generator[Round, None, None]:
        gradient = reduction.wait().float()
        if self.plan.reduce_across == "step":
            gradient = yield from self._reducing_across(gradient)
        if earlier is not None:
            earlier.wait()
        bucket.total = gradient if bucket.total is None else bucket.total.add_(gradient)

    def _reducing_across(self, gradient: Tensor) -> Steps:
        """From the gradient partition to the optimizer's, then the sum over all ranks if that is not the whole machine.

        With the hierarchical plan a gradient leaves its node here, and only here: once per step.
        """
        shard = yield from self.communicator.reducing(gradient, self.plan.moves.reduce_to_optimizer)
        return (yield from self.communicator.all_reducing(shard, self.plan.moves.all_reduce_replicas))

    # --- step: update in the optimizer partition, and the new weights back ---

    @torch.no_grad()
    def step(self, closure: None = None) -> float:  # type: ignore[override]  # torch's returns None without a closure
        """Update with the gradients since the last step; returns their global norm before clipping.

        With a loss scale (float16) gradients that overflowed leave the weights as they are and lower the scale; the
        norm is then not finite. Without one, NaN in a gradient gets into the masters. RuntimeError, and nothing is
        changed, when there was no backward, an exception ended one, loss scaling saw no gradient enter, a weight or a
        `requires_grad` was changed, or under inference mode; ValueError for a closure, which would have to run
        on all ranks; BrokenEngineError, from then on, for an exception in it; FloatingPointError, and the weights stay,
        when the loss scale cannot be lowered any further.
        """
        if closure is not None:
            raise ValueError("step takes no closure")
        self._require(self._guard.require_sound)
        if not self.has_gradients:
            raise RuntimeError("step without a backward since the last one: there are no gradients")
        if self.loss_scale:
            self.loss_scale.require_scaled()
        with self._guard.to_the_end("step"):
            means = self._means()
            present = [mean for mean in means if mean is not None]
            norm = global_norm(present, self.norm_group)
        if self.loss_scale:
            self.loss_scale.update(finite := bool(norm.isfinite()))
            if not finite:
                return norm.item()
        with self._guard.to_the_end("step"):
            if self.max_grad_norm is not None:
                torch._foreach_mul_(present, (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
            self.masters.update(means)
            self._publish()
            if not self.late_weights:
                self.synchronize()
        return norm.item()

    def _means(self) -> list[Tensor | None]:
        """Mean over ranks of each bucket's gradient, fp32, this rank's part of the optimizer partition. A bucket that
        no backward has reached since the last step gets zeros where the optimizer keeps states of it, else None.
        Nothing is left of the gradients."""
        for bucket in self.buckets:
            if bucket.kept:
                self._leave(bucket)
        self._settle()
        self.synchronize()  # a master must not change while it is still being sent
        ranks = self.plan.topology.world_size * (self.loss_scale.value if self.loss_scale else 1)
        means = [None if bucket.total is None else bucket.total.div_(ranks) for bucket in self.buckets]
        for number, mean in enumerate(means):
            if mean is None and self.masters.has_states(number):
                means[number] = torch.zeros_like(self.masters.flat[number])
        self._forget()
        return means

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the accumulated gradients (`step` has done so already).

        After an exception in a forward or backward this is what makes the engine as it was after the last step; all
        ranks must call it. BrokenEngineError when they did not leave the pass at the same place.
        """
        self._require(self._guard.require_usable)
        if fsdp_private.unfinished(self.model):
            with self._guard.to_the_end("zero_grad after an exception in a forward or backward"):
                self._recover()
        self._settle()
        self._forget()

    def _settle(self) -> None:
        """Finish all that is under way but new weights."""
        for stream in (self.gathers, self.reductions, self.averages):
            stream.finish()

    def _forget(self) -> None:
        """The gradients."""
        self._told = False
        if self.loss_scale:
            self.loss_scale.forget()
        for bucket in self.buckets:
            bucket.gradient = bucket.total = bucket.reduction = bucket.average = None
            bucket.backwards, bucket.summed_bytes, bucket.kept, bucket.spent = 0, 0, False, True

    @property
    def has_gradients(self) -> bool:
        """Whether there was a backward since the last step. BrokenEngineError once the engine is of no further use."""
        self._require(self._guard.require_usable)
        return any(bucket.backwards for bucket in self.buckets)

    def require_same_trained(self) -> None:
        """RuntimeError when another parameter requires a gradient than when the model was wrapped."""
        self._guard.require_same_trained()

    def publish(self) -> None:
        """Make the masters the weights of the model, on all ranks (`step` does)."""
        self.synchronize()
        self._publish()
        self.synchronize()

    def discard(self) -> None:
        """Drop gathered weights and secondary shards of all buckets, frozen ones too, for weights that change."""
        self._discard(self.all_buckets)

    def _discard(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            bucket.sharded.discard()
            bucket.secondary = None

    def _publish(self) -> None:
        """Start sending the new weights, in the order in which the next forward needs them."""
        masters = dict(zip(self.buckets, self.masters.flat, strict=True))
        self._discard(masters)  # they are of the old weights
        for bucket in dict.fromkeys(bucket for bucket in (*self._order, *masters) if bucket in masters):
            steps = self._publishing(bucket, masters[bucket])
            bucket.publication = self.publications.start(self._labelled(3, bucket, steps))
            bucket.stale = not bucket.publication.ended(0)

    def _publishing(self, bucket: Bucket, master: Tensor) -> Generator[Round, None, None]:
        """All new weights of the rank's weight partition, from the optimizer partition."""
        updated = yield from self.communicator.gathering(master.to(self.weight_dtype), self.plan.moves.gather_updated)
        gradient_parts, optimizer_parts = splits(self.plan)
        in_rank_order = updated.view(optimizer_parts, gradient_parts, -1)
        bucket.sharded.write(in_rank_order.transpose(0, 1).reshape(-1))

    def synchronize(self) -> None:
        """Wait until this rank has all weights of the last step. Others need not call it."""
        with self._guard.to_the_end("step"):
            self.publications.finish()

    # --- exceptions ---

    def _recover(self) -> None:
        """Forget a forward or backward that an exception ended. What is under way arrives only if all ranks left it at
        the same place; that is asked first, and costs nothing where there was no exception."""
        places = [0] * dist.get_world_size()
        dist.all_gather_object(places, self.communicator.position)
        if len(set(places)) > 1:
            raise ExchangeError(f"the ranks left it at different places, after {places} collectives")
        self._settle()
        fsdp_private.reset(self.model, [bucket.sharded for bucket in self.all_buckets])

    def _require(self, what: Callable[[], None]) -> None:
        """That the guard's `what` holds, and that no weights of the last step got lost on their way."""
        for bucket in self.buckets:
            if bucket.publication is not None and bucket.publication.failed is not None:
                self.synchronize()
        what()

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
        known = {id(parameter): name for name, parameter in names.parameters(self.model)}
        return within(bucket.sharded.pieces(known), own_chunk(self.plan, dist.get_rank()) * numel, numel)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of state on this rank right now, by kind. Gradients exist from backward to step, secondary shards from
        forward to step: look then. Sums that have left their partition count until step; what is on its way there, or
        has arrived, is `memory.under_way`."""
        self._settle()
        return {
            "weights": sum(bucket.sharded.weight_bytes() for bucket in self.all_buckets),
            "secondary": sum(bucket.secondary.nbytes for bucket in self.all_buckets if bucket.secondary is not None),
            "gradients": sum(bucket.summed_bytes for bucket in self.buckets),
            "optimizer": self.masters.held_bytes(),
        }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """NotImplementedError after construction: the masters are cut where the group changes."""
        if self._complete:
            raise NotImplementedError("add_param_group: give all parameter groups to the constructor, as `params`")
        super().add_param_group(param_group)  # torch's constructor calls this

    def state_dict(self) -> dict[str, Any]:
        """NotImplementedError: a rank has only its part. `repro.zero.checkpoint` saves and restores the whole."""
        raise NotImplementedError("state_dict() would hold this rank's part only: use repro.zero.checkpoint.save")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """NotImplementedError, as `state_dict`."""
        raise NotImplementedError("use repro.zero.checkpoint.load")


def _arrived(bucket: Bucket) -> None:
    """Wait for the weights of the last step."""
    if bucket.publication is not None:
        bucket.publication.wait()
