"""Placement as servers ask for it while they run: a policy for vLLM's expert-parallel load balancer (EPLB).

    from vllm.distributed.eplb.policy import EPLB_POLICIES
    counts = RoutingCounts(layers, experts, device, group)       # `repro.exflow.recording`
    EPLB_POLICIES["default"] = policy_for(counts)                # before a model is loaded
    ...                                                          # vLLM loads it
    for layer, module in enumerate(moe_layers):
        module.router.set_capture_fn(counts.hook(layer))         # sees logical experts

All of it in every worker process. vLLM looks a policy up in that table by its name when it takes on a model, and 0.32
knows the one name. It asks on all ranks with the tokens of each expert, takes the expert in each slot, and derives the
other two maps of DeepSeek's interface itself; `rebalance_experts` gives all three to servers that want them.
`fixed_policy` answers with a placement that is there already.
"""

import warnings
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from repro.exflow.levels import make_levels
from repro.exflow.recording import RoutingCounts
from repro.exflow.search import portfolio
from repro.exflow.serving import eplb
from repro.exflow.serving.online import place_for_hops
from repro.exflow.serving.slots import Replicas, logical_to_physical

OUT_OF_TURN = "{} rows came out of turn (micro-batches that overlap?): their transitions are not counted"


class AffinityPolicy:
    """What `vllm.distributed.eplb.policy.AbstractEplbPolicy` asks for. With `routing`, slots are filled for few hops at
    no more load than EPLB (`online.py`), at `costs` of a hop inside a node and between nodes, in `rounds` of search and
    at most `time_limit_s`; the answer of the first of its ranks holds for all. Without, or before it has counted
    anything, by the loads alone, as EPLB does. With `placed`, that is the answer."""

    placed: ClassVar[Replicas | None] = None
    routing: ClassVar[RoutingCounts | None] = None
    costs: ClassVar[tuple[float, float]] = (1.0, 2.0)
    rounds: ClassVar[int] = 20
    time_limit_s: ClassVar[float] = 30.0

    @classmethod
    def rebalance_experts(
        cls,
        weight: Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Tensor | None = None,
    ) -> Tensor:
        """The expert in each slot, int64 [layers, num_replicas] on the CPU, for the tokens of each expert, `weight`
        [layers, experts]. Slots are shared evenly by `num_ranks` ranks in `num_nodes` nodes, in their order.

        `num_groups`: of experts, in group-limited routing; EPLB packs them onto nodes where they share evenly.
        `old_global_expert_indices`: the slots before; an expert that stays on a rank keeps its slot there. The counts
        of `routing` are read, on all ranks together, and cleared, also where this raises. ValueError for numbers that
        do not divide, and counts or a placement of another model.
        """
        load, routing = weight.double().cpu().numpy(), cls.routing
        counts = np.zeros(0) if routing is None else routing.total()[1]
        late = 0
        if routing is not None:
            late = routing.out_of_turn
            routing.clear()
        if cls.placed is not None:
            slots = _slots_of(cls.placed, (*load.shape, num_replicas, num_ranks))
        elif routing is not None and counts.any():
            levels = make_levels(num_ranks, num_ranks // num_nodes, cls.costs)
            slots = place_for_hops(load, counts, num_replicas, levels, num_groups, cls.rounds, cls.time_limit_s)
            slots = routing.agreed(slots)
        else:
            slots, _, _ = eplb.rebalance_experts(load, num_replicas, num_groups, num_nodes, num_ranks)
        if old_global_expert_indices is not None:
            slots = keep_slots(slots, old_global_expert_indices.cpu().numpy(), num_ranks)
        if late:  # of this rank: last, as all ranks have to come this far together
            warnings.warn(OUT_OF_TURN.format(late), stacklevel=2)
        return torch.from_numpy(slots)


def policy_for(routing: RoutingCounts | None) -> type[AffinityPolicy]:
    """A policy of its own that reads `routing`. The search is compiled now, not in the first call's time."""
    portfolio.compile_kernels()
    return type("AffinityPolicy", (AffinityPolicy,), {"routing": routing})


def fixed_policy(placed: Replicas) -> type[AffinityPolicy]:
    """A policy whose answer is always `placed`, made beforehand of a recorded trace. ValueError from it where the server
    has other layers, experts, slots or ranks."""
    return type("FixedPolicy", (AffinityPolicy,), {"placed": placed})


def _slots_of(placed: Replicas, asked: tuple[int, ...]) -> np.ndarray:
    """The expert in each slot of a placement; ValueError where `asked`, the server's numbers, are not its own."""
    layers, slots = placed.physical_to_logical.shape
    held = layers, placed.num_experts, slots, placed.gpus
    if held != asked:
        raise ValueError(f"(layers, experts, slots, ranks) are {asked} in the server, {held} in the placement")
    return placed.physical_to_logical.copy()


def rebalance_experts(
    weight: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    policy: type[AffinityPolicy] = AffinityPolicy,
) -> tuple[Tensor, Tensor, Tensor]:
    """`policy.rebalance_experts` with the three maps of DeepSeek's EPLB: the expert in each slot, int64 [layers,
    num_replicas], the slots of each expert, [layers, experts, most copies], -1 where it has fewer, and how many it has,
    [layers, experts]."""
    physical = policy.rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_ranks)
    slots, copies = logical_to_physical(physical.numpy())
    return physical, torch.from_numpy(slots), torch.from_numpy(copies)


def keep_slots(new: np.ndarray, old: np.ndarray, ranks: int) -> np.ndarray:
    """`new` [layers, slots], the experts of each rank in another order: as many as possible in the slot that they have
    in `old`, so that a server moves nothing inside a rank. `new` itself where the numbers of slots differ."""
    if new.shape != old.shape:
        return new
    kept = new.reshape(-1, new.shape[1] // ranks).copy()
    for row, before in zip(kept, old.reshape(kept.shape).tolist(), strict=True):
        left, place = row.tolist(), [-1] * len(row)
        for slot, expert in enumerate(before):
            if expert in left:
                left.remove(expert)
                place[slot] = expert
        row[:] = [left.pop(0) if expert < 0 else expert for expert in place]
    return kept.reshape(new.shape)
