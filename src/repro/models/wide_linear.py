"""Linear layers for training in bfloat16 on processors without instructions for it, where torch's own products are slow.

A product of bfloat16 is one of float32 whose result is rounded: instructions for it sum in float32, too. So these layers
multiply in float32, forward and backward, and round to bfloat16 what torch would have rounded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WideLinear(nn.Linear):
    """`nn.Linear` whose products of bfloat16 by bfloat16 are made in float32; not those that autocast casts."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is self.weight.dtype is torch.bfloat16:
            return _WideProduct.apply(x, self.weight, self.bias)
        return super().forward(x)


class _WideProduct(torch.autograd.Function):
    """y = x Wᵀ + b in bfloat16. Keeps x and W as they are: an engine that shards W frees it between the passes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = gradient.float()
        rows = wide.reshape(-1, wide.shape[-1])
        of_x = (wide @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_weight = (rows.T @ x.float().reshape(-1, x.shape[-1])).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0).to(weight.dtype) if ctx.biased and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


def widen(model: nn.Module) -> None:
    """Make every `nn.Linear` of `model` a `WideLinear`, in place, unless oneDNN multiplies bfloat16 here. On GPUs
    that is of no use: leave their models as they are."""
    if multiplies_bfloat16():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = WideLinear


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor: on x86 with AVX-512 (at best with instructions of its own for
    it) or AVX_NE_CONVERT."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
