"""EPLB, DeepSeek's expert-parallelism load balancer, written anew from its published description: a yardstick.

It looks at the tokens of each expert, layer by layer, and knows nothing of hops. Two ideas:

  replicate  a spare slot goes to the expert with the most tokens per replica, one slot after another
  pack       the heaviest replica first, each onto the least loaded pack that still has a free slot

Hierarchical, where the groups of experts share evenly among nodes (tokens of group-limited routing then stay on few
nodes): groups are packed onto nodes, then experts replicated and packed onto GPUs inside each node. Else global: all
GPUs are one node. Replicas are meant to get equal shares of an expert's tokens.
"""

import numpy as np

from repro.exflow.serving.slots import logical_to_physical

Rebalanced = tuple[np.ndarray, np.ndarray, np.ndarray]


def rebalance_experts(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> Rebalanced:
    """Fill `num_replicas` slots per layer, equally many on each GPU, for `weight` [layers, E], tokens of each expert.

    Returns three int64 arrays: `physical_to_logical` [layers, num_replicas], the expert in each slot (slot s is on GPU
    s // (num_replicas / num_gpus)); `logical_to_physical` [layers, E, most replicas], the slots of each expert, -1
    where it has fewer; `counts` [layers, E], replicas of each. The policy is hierarchical where `num_nodes` divides
    `num_groups`, else global. ValueError where numbers do not divide as they must, slots do not hold all experts, or
    `weight` is not [layers, E], finite and not negative.
    """
    weight = np.asarray(weight, np.float64)
    if weight.ndim != 2 or not weight.size or not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError(f"weight is {weight.dtype} {weight.shape}, must be [layers, experts], finite and not negative")
    experts = weight.shape[1]
    if num_groups < 1 or num_nodes < 1 or num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    for what, number, parts in (
        ("experts", experts, num_groups),
        ("GPUs", num_gpus, num_nodes),
        ("slots", num_replicas, num_gpus),
    ):
        if parts < 1 or number % parts:
            raise ValueError(f"{number} {what} cannot be shared evenly by {parts}")
    if num_replicas < experts:
        raise ValueError(f"{num_replicas} slots cannot hold {experts} experts")
    slots = np.stack([_layer(own, num_replicas, num_groups, num_nodes, num_gpus) for own in weight])
    return slots, *logical_to_physical(slots)


def slots_and_tokens(
    weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of `rebalance_experts`: the expert in each slot, [layers, num_replicas]; which part of its expert's tokens, and
    how many, it takes; and the tokens of the busiest GPU, [layers]."""
    slots, _, copies = rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus)
    sharing = np.take_along_axis(copies, slots, axis=1)
    tokens = np.take_along_axis(weight, slots, axis=1) / sharing
    return slots, 1 / sharing, tokens, tokens.reshape(len(slots), num_gpus, -1).sum(axis=2).max(axis=1)


def _layer(weight: np.ndarray, slots: int, groups: int, nodes: int, gpus: int) -> np.ndarray:
    """int64 [slots]: the expert in each slot of one layer, for the tokens `weight` [E] of its experts."""
    members = np.arange(len(weight)).reshape(groups, -1)
    filled = []
    for own_groups in pack(weight[members].sum(axis=1), nodes):
        experts = members[own_groups].ravel()
        copies = replicate(weight[experts], slots // nodes)
        share = weight[experts] / np.bincount(copies)
        filled += [experts[copies[items]] for items in pack(share[copies], gpus // nodes)]
    return np.concatenate(filled)


def pack(weight: np.ndarray, packs: int) -> list[np.ndarray]:
    """The items of each pack, equally many, with loads as even as the rule gets them; `weight` [items]."""
    size = len(weight) // packs
    if size == 1:
        return list(np.arange(packs)[:, None])
    items: list[list[int]] = [[] for _ in range(packs)]
    load = np.zeros(packs)
    for item in np.argsort(-weight, kind="stable"):
        open_ = [len(own) < size for own in items]
        lightest = int(np.where(open_, load, np.inf).argmin())
        items[lightest].append(int(item))
        load[lightest] += weight[item]
    return [np.array(own) for own in items]


def replicate(weight: np.ndarray, slots: int) -> np.ndarray:
    """int64 [slots]: every item once, then each further slot for the one with the most `weight` [items] per replica."""
    counts = np.ones(len(weight), np.int64)
    extra = []
    for _ in range(slots - len(weight)):
        heaviest = int((weight / counts).argmax())
        counts[heaviest] += 1
        extra.append(heaviest)
    return np.array([*range(len(weight)), *extra], np.int64)
