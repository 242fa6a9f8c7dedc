"""Re-place experts while a decoder serves, as servers with an expert load balancer do: count, ask a policy, move."""

from dataclasses import dataclass

import numpy as np
import torch

from repro.exflow.moe import Decoder
from repro.exflow.recording import RoutingCounts
from repro.exflow.serving.policy import AffinityPolicy
from repro.exflow.serving.slots import Replicas


@dataclass(frozen=True)
class Rebalanced:
    """One re-placement as this rank saw it: experts that came to it, and bytes that it sent for others, by level."""

    iteration: int
    experts: int
    sent: dict[str, int]


class Rebalancer:
    """`Decoder.generate(..., after=Rebalancer(...))`: every `every` iterations `policy` places the experts anew, with
    `extra_slots` of every rank and layer for copies.

    The tokens since the last time are what it is asked with: `routing` counts them on all ranks, and a policy that
    wants the transitions reads them there itself (`serving/policy.py`). All ranks must get the same answer. `history`:
    what was done. ValueError for `every` below 1.
    """

    def __init__(
        self, decoder: Decoder, policy: type[AffinityPolicy], routing: RoutingCounts, every: int, extra_slots: int = 0
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}, must be at least 1 iteration")
        decoder.routing = routing
        self.decoder, self.policy, self.routing = decoder, policy, routing
        self.every, self.slots = every, decoder.model.config.experts + extra_slots * decoder.ranks
        self.history: list[Rebalanced] = []

    def __call__(self, iteration: int) -> None:
        if (iteration + 1) % self.every:
            return
        topology, ranks = self.decoder.exchange.communicator.topology, self.decoder.ranks
        nodes = topology.levels[-1].size if len(topology.levels) > 1 else 1
        load, _ = self.routing.total()
        layout, even = self.decoder.hosting.layout, np.arange(self.slots) * ranks // self.slots
        # Unless slots are where a policy takes them to be, it is told of none.
        told = layout.rank.shape[1] == self.slots and (layout.rank == even).all()
        now = torch.from_numpy(layout.expert) if told else None
        new = self.policy.rebalance_experts(torch.from_numpy(load), self.slots, 1, nodes, ranks, now)
        self.routing.clear()
        experts, sent = self.decoder.replace(Replicas(new.numpy(), ranks, ranks // nodes))
        self.history.append(Rebalanced(iteration, experts, sent))
