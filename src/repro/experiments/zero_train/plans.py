"""The plan of a point, and the memory that it takes."""

from typing import get_args

from repro import zero
from repro.experiments.zero_train import Libraries, ZeroTrain
from repro.scaling.step import activations, layout_of
from repro.zero import Plan, plan
from repro.zero import memory as bytes_of


def memory(point: ZeroTrain) -> float | None:
    """Predicted bytes per rank: states, working memory and activations, or the sums of a step; None for a library's
    plan."""
    chosen = plan_of(point)
    if chosen is None:
        return None
    return bytes_of.needed(chosen, layout_of(point.gpt), activations(point.gpt, point.micro_batch))


def plan_of(point: ZeroTrain) -> Plan | None:
    """None for a library's."""
    topology = point.topology
    if point.plan in get_args(Libraries):
        return None
    if point.plan == "hierarchical":
        chosen = plan.hierarchical(
            topology,
            point.weights,
            point.gradients,
            secondary=None if point.secondary == "none" else point.secondary,
            weight_bits=_bits(point.weight_bits),
            gradient_bits=_bits(point.gradient_bits),
            reduce_across=point.reduce_across,
        )
    elif point.plan == "qgz_one_hop":
        chosen = plan.qgz(topology, hops=1)
    elif point.plan == "best":
        chosen = zero.search(layout_of(point.gpt), topology, micro_batches=point.accumulation)[0].plan
    else:
        chosen = plan.named(point.plan, topology)
    return plan.blockwise(chosen, point.block or 1 << 40)


def _bits(text: str) -> int | tuple[int, ...]:
    values = tuple(map(int, text.split(",")))
    return values if len(values) == 3 else values[0]
