"""Linear layers for inference, in the layout that is fastest to multiply with."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GELU = Literal["none", "tanh"]
"""How GELU is computed, as torch calls it: exactly, or by a hyperbolic tangent."""

_ROWS = 32  # oneDNN asks how many rows to expect when it lays weights out


Linear = Callable[[Tensor], Tensor]
"""y = x Wᵀ + b for x [n, in], W [out, in] and b [out] or None; or its GELU."""


def torch_linear(weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> Linear:
    """In oneDNN's layout on a CPU that has it."""
    possible = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    packed = possible and weight.dtype in (torch.float32, torch.bfloat16)
    return (OneDNNLinear if packed else PlainLinear)(weight, bias, gelu)


class PlainLinear:
    """As torch has it, on any device. `layout`, of all classes of linear layers, goes into records."""

    layout = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> None:
        self.weight, self.bias, self.gelu = weight, bias, gelu

    def __call__(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if self.gelu is None else F.gelu(y, approximate=self.gelu)


class OneDNNLinear:
    """The weight is packed once into oneDNN's blocked layout (half the time of `F.linear` on the machines measured).

    A single row would take a matrix-vector kernel that sums in another order than the matrix kernel, and a lone request
    would round differently from a fused one; so one row is computed as two. GELU is part of the product for the same
    reason: `F.gelu` takes another formula at the end of a thread's share, so a row's bits would depend on its place.
    """

    layout = "oneDNN packed"

    def __init__(self, weight: Tensor, bias: Tensor | None = None, gelu: GELU | None = None) -> None:
        self.weight, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), bias
        self._after: tuple[str, list[float], str] = ("none", [], "") if gelu is None else ("gelu", [], gelu)

    def __call__(self, x: Tensor) -> Tensor:
        rows = x if x.shape[0] > 1 else x.expand(2, -1)
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, *self._after)[: x.shape[0]]
