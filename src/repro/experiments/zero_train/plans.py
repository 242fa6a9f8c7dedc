"""The plan of a point, the layout of its model, and the memory that they take."""

import functools

import torch

from repro.baselines import systems
from repro.experiments.zero_train import ZeroTrain
from repro.models.gpt import GPT, GPTConfig
from repro.zero import Plan, plan
from repro.zero import memory as bytes_of
from repro.zero.layout import Layout, layout


def memory(point: ZeroTrain) -> dict[str, float] | None:
    """Predicted bytes per rank: states, working memory and activations; None for a library's plan."""
    if point.plan in systems.SYSTEMS:
        return None
    chosen, model = plan_of(point), layout_of(point.gpt)
    config = point.gpt
    return {
        **bytes_of.predict(chosen, model),
        "working": bytes_of.working(chosen, model),
        "activations": bytes_of.activations(
            config.layers,
            config.hidden,
            config.seq_len,
            point.micro_batch,
            config.vocab,
            checkpointing=point.checkpointing,
        ),
    }


def plan_of(point: ZeroTrain) -> Plan:
    """One of our own plans."""
    topology = point.topology
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
        chosen = plan.search(layout_of(point.gpt), topology, micro_batches=point.accumulation)[0].plan
    else:
        chosen = plan.named(point.plan, topology)
    return plan.blockwise(chosen, point.block or 1 << 40)


def _bits(text: str) -> int | tuple[int, ...]:
    values = tuple(map(int, text.split(",")))
    return values if len(values) == 3 else values[0]


@functools.cache
def layout_of(config: GPTConfig) -> Layout:
    """Buckets and parameters of a GPT."""
    with torch.device("meta"):
        return layout(GPT(config))
