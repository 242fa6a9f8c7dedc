"""DeepSpeed's quantiser kernels (csrc/quantization) in plain torch, so that its qwZ and qgZ run without a GPU.

This module stands in for the compiled one, `QuantizerBuilder().load()`. It has the functions that ZeRO++ calls, with
the same arguments and arithmetic:

    quantize             int8 codes of the weights, before the all-gather (qwZ)
    dequantize           codes back to fp16: after the all-gather, and after the last hop of the gradients
    swizzle_quant        int4 codes of a gradient, its chunks reordered for two hops (qgZ, before the hop inside the
                         node)
    quantized_reduction  sum of what the ranks of the node sent, quantised again (between the two hops)

A group is a run of values that share one scale, fp32: the step between two codes, max |x| / 2^(bits - 1). Codes are
round(x / step), half to even, cut to -2^(bits-1) .. 2^(bits-1) - 1: the largest value of a group loses a whole step.

As in the kernels, values are fp16 on both sides, and `quantized_reduction` sums and does **not** divide. Not as in the
kernels: an input of another dtype is converted, where they read its bits as if they were fp16; sums are taken in fp32,
where they add in fp16; and only symmetric quantisation in one slice (`pipeline` 1), which is all that ZeRO++ uses.

Codes are int8: one each for 8 bits; for 4 bits two per byte, the first of the two in the upper half. Every function
raises ValueError for bits or a type that it does not know. Groups that do not divide the values to quantise are a
ValueError; groups that do not divide the codes to restore are a RuntimeError of torch.
"""

import torch
from torch import Tensor

Symmetric = 0  # the type of quantisation, by the name that the kernels have for it


def quantize(values: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
    """[.., n] to codes [.., n * bits / 8] and scales [groups], where the kernel's are [groups, 1]."""
    _check(bits, kind)
    codes, scales = _quantize(values, groups, bits)
    return codes.view(*values.shape[:-1], -1), scales.flatten()


def dequantize(codes: Tensor, scales: Tensor, groups: int, bits: int, kind: int) -> Tensor:
    """Codes [.., m] and scales of any shape with `groups` values to fp16 [.., m * 8 / bits]."""
    _check(bits, kind)
    return _dequantize(codes, scales, groups, bits).view(*codes.shape[:-1], -1)


def swizzle_quant(
    values: Tensor, groups: int, bits: int, kind: int, pipeline: int, nodes: int, ranks_per_node: int
) -> tuple[Tensor, Tensor]:
    """A gradient in rank order to flat codes and scales [groups, 1], both in the order of the two hops.

    The gradient is one chunk per rank of the world; chunk (node, local) goes to place (local, node), so that both
    hops send contiguous pieces. 2 nodes of 4: 0 1 2 3 4 5 6 7 becomes 0 4 1 5 2 6 3 7.
    """
    _check(bits, kind)
    world = nodes * ranks_per_node
    if pipeline != 1:
        raise ValueError(f"pipeline is {pipeline}: only one slice is implemented")
    if groups % world:  # the kernel launches floor(groups / world) per rank and leaves the rest unwritten
        raise ValueError(f"{groups} groups cannot be dealt to {world} ranks evenly")
    codes, scales = (
        part.view(nodes, ranks_per_node, -1).transpose(0, 1).flatten() for part in _quantize(values, groups, bits)
    )
    return codes, scales[:, None]


def quantized_reduction(
    codes: Tensor, scales: Tensor, in_groups: int, out_groups: int, bits: int, kind: int, ranks_per_node: int
) -> tuple[Tensor, Tensor]:
    """Codes of `ranks_per_node` tensors one after another, `in_groups` groups in all, to the codes of their sum in
    `out_groups` groups, flat, and its scales [out_groups, 1]."""
    _check(bits, kind)
    parts = _dequantize(codes, scales, in_groups, bits).view(ranks_per_node, -1)
    codes, scales = _quantize(parts.float().sum(dim=0), out_groups, bits)
    return codes.flatten(), scales


def _check(bits: int, kind: int) -> None:
    if bits not in (4, 8) or kind != Symmetric:
        raise ValueError(f"{bits} bits, type {kind}: only symmetric quantisation to 4 or 8 bits is implemented")


def _quantize(values: Tensor, groups: int, bits: int) -> tuple[Tensor, Tensor]:
    """Values of any shape to codes [groups, n * bits / 8] and scales [groups, 1]."""
    if values.numel() % groups:
        raise ValueError(f"{values.numel()} values cannot be divided into {groups} groups")
    values = values.half().reshape(groups, -1).float()
    largest = values.abs().amax(dim=1, keepdim=True)
    steps_per_unit = torch.where(largest == 0, 1.0, 2 ** (bits - 1) / largest)
    codes = (values * steps_per_unit).round_().clamp_(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1).to(torch.int8)
    if bits == 4:
        first, second = codes.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        codes = ((first << 4) | (second & 0xF)).view(torch.int8)
    return codes, 1 / steps_per_unit


def _dequantize(codes: Tensor, scales: Tensor, groups: int, bits: int) -> Tensor:
    """Codes of any shape to fp16 [groups, n]."""
    codes = codes.reshape(groups, -1)
    if bits == 4:  # a shift of int8 to the right keeps the sign
        codes = torch.stack((codes >> 4, (codes << 4) >> 4), dim=-1).flatten(-2)
    return (codes.float() * scales.reshape(groups, 1)).half()
