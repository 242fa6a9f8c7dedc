"""A linear layer for inference, in the layout that is fastest to multiply with."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Linear"]

_ROWS = 32  # oneDNN asks how many rows to expect when it lays weights out


class Linear:
    """y = x Wᵀ + b for x [n, in], W [out, in] and b [out] or None.

    On a CPU the weight is packed once into oneDNN's blocked layout (`packed`; half the time of `F.linear` on the machines measured). A
    single row would take a matrix-vector kernel that sums in another order than the matrix kernel, and a lone request would round
    differently from a fused one; so one row is computed as two.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
        self.shape, self.nbytes = weight.shape, weight.nbytes
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS) if self.packed else weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        rows = x if x.shape[0] > 1 else x.expand(2, -1)
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")[: x.shape[0]]
