"""A torch optimizer on flat fp32 master shards: each rank updates only its partition."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ShardedOptimizer:
    """`optimizer_cls` over this rank's masters, one flat fp32 tensor per bucket.

    Any optimizer whose update is elementwise gives exactly what it would give on the whole model (SGD, Adam, AdamW, RMSprop,
    Adagrad); one that looks at a tensor's shape (LBFGS, Adafactor, Muon) does not. `inner` is the torch optimizer, for
    learning-rate schedules.
    """

    def __init__(
        self, masters: Sequence[Tensor], optimizer_cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
    ) -> None:
        self.masters = [nn.Parameter(master) for master in masters]
        self.inner = optimizer_cls(self.masters, **options)

    @torch.no_grad()
    def update(self, gradients: Sequence[Tensor], group: dist.ProcessGroup | None, max_norm: float | None) -> Tensor:
        """One step with `gradients` (fp32, shaped like the masters); returns the global norm before clipping, a scalar.

        `group`: the ranks that hold the other shards, None when this rank holds all. With `max_norm` the gradients are
        scaled down, in place, to that global norm, as `torch.nn.utils.clip_grad_norm_` does.
        """
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        if group is not None:
            dist.all_reduce(squares, group=group)
        norm = squares.sqrt()
        if max_norm is not None:
            torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)
        return norm

    def held_bytes(self) -> int:
        """Bytes of masters and optimizer state (Adam: master, two moments and a step counter per bucket)."""
        states = [value for state in self.inner.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in (*self.masters, *states))
