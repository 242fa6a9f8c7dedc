"""What a ZeRO plan is: which state is partitioned over which level of the machine, and how each message travels.

A state that is partitioned over a level is spread over the ranks of one unit of that level and replicated in every
other unit: over `node` each node holds the whole of it once; over None every rank does. Four states (weights, secondary
shards of the weights, gradients, optimizer) times the levels, times the routes between them with their bits: DDP,
ZeRO-1 to 3, ZeRO++, MiCS, HSDP and the three-level plan of arXiv 2501.04266 are points of it (`plan.py`).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from repro.comm import Route
from repro.topology import Topology


@dataclass(frozen=True)
class Moves:
    """The routes of a plan cut to the levels that they cross, None where nothing is to be sent."""

    gather_weights: Route | None  # all-gather of the weight shards, for a forward or backward
    gather_secondary: Route | None  # all-gather of the secondary shards, for all passes of a step but its first forward
    reduce_to_weights: Route | None  # reduce-scatter of a gradient to the weights' partition
    reduce_to_gradients: Route | None  # reduce-scatter of that to the gradients' partition
    reduce_to_optimizer: Route | None  # reduce-scatter of the accumulated gradient to the optimizer's partition
    all_reduce_replicas: Route | None  # all-reduce among replicas of the optimizer shard
    gather_updated: Route | None  # all-gather of the updated weights of a weight shard


@dataclass(frozen=True)
class Plan:
    """A point of the space. Level names belong to `topology`; None: replicated on every rank.

    weight_route     all-gather of the weights before every forward and backward; with secondary shards only before
                     the first forward of a step
    secondary_route  all-gather of the secondary shards before every other forward and backward of the step. [INF]
                     (inferred): the paper does not say whether the hierarchical plan has any
    gradient_route   reduce-scatter of the gradients; the all-reduce too where the optimizer level is not the outermost
    update_route     all-gather of the updated weights, from the optimizer's partition to that of the weights, per step
    reduce_across    [INF] when gradients leave their partition for the optimizer's: once per step, or per micro-batch

    Raises ValueError, with the reason, for a plan that cannot work.
    """

    name: str
    topology: Topology
    weights: str | None
    gradients: str | None
    optimizer: str | None
    weight_route: Route
    gradient_route: Route
    update_route: Route
    secondary: str | None = None
    secondary_route: Route | None = None
    reduce_across: Literal["step", "micro_batch"] = "step"

    def __post_init__(self) -> None:
        depth = {name: self.depth(getattr(self, name)) for name in ("weights", "secondary", "gradients", "optimizer")}
        for state, other, reason in (
            ("gradients", "weights", "the gradient of a sharded weight arrives as a shard of that size already"),
            ("optimizer", "gradients", "a rank would update weights whose gradient it does not hold"),
        ):
            if depth[state] < depth[other]:
                raise ValueError(
                    f"plan {self.name!r}: {state} over {getattr(self, state) or 'nothing'}, {other} over "
                    f"{getattr(self, other)}: {state} need a level at least as wide, because {reason}"
                )
        if self.secondary is not None and depth["secondary"] >= depth["weights"]:
            raise ValueError(
                f"plan {self.name!r}: secondary shards over {self.secondary}, weights over "
                f"{self.weights or 'nothing'}: they save traffic only when they are gathered from fewer ranks than the weights"
            )
        if (self.secondary is None) != (self.secondary_route is None):
            raise ValueError(f"plan {self.name!r}: `secondary` and `secondary_route` come together")
        if self.reduce_across not in ("step", "micro_batch"):
            raise ValueError(f"reduce_across is {self.reduce_across!r}, allowed: step, micro_batch")
        for route in (self.weight_route, self.gradient_route, self.update_route, self.secondary_route):
            if route is not None and tuple(v for hop in route.hops for v in hop) != self.topology.names:
                raise ValueError(
                    f"plan {self.name!r}: the hops {route.hops} do not walk the levels {self.topology.names} in order"
                )

    def depth(self, level: str | None) -> int:
        """Levels up to and with `level`; 0 for None."""
        return 0 if level is None else self.topology.index(level) + 1

    def degree(self, level: str | None) -> int:
        """Ranks that a state is spread over."""
        return 1 if level is None else self.topology.span(level)

    @property
    def has_secondary(self) -> bool:
        """Whether secondary shards are kept: over more than one rank, and fewer than share the weights.

        A plan with secondary shards in the node has no use for them on a machine of one node.
        """
        return 1 < self.degree(self.secondary) < self.degree(self.weights)

    @property
    def sums_travel(self) -> bool:
        """Whether a step's accumulated gradients have somewhere to go: the moment that can hide in the last backward."""
        return self.reduce_across == "step" and self.degree(self.gradients) < self.topology.world_size

    @cached_property
    def moves(self) -> Moves:
        """What has to travel over which levels, and how."""

        def along(route: Route | None, below: str | None, upto: str | None) -> Route | None:
            return route.within(self.levels(below, upto)) if route else None

        return Moves(
            gather_weights=along(self.weight_route, None, self.weights),
            gather_secondary=along(self.secondary_route, None, self.secondary),
            reduce_to_weights=along(self.gradient_route, None, self.weights),
            reduce_to_gradients=along(self.gradient_route, self.weights, self.gradients),
            reduce_to_optimizer=along(self.gradient_route, self.gradients, self.optimizer),
            all_reduce_replicas=along(self.gradient_route, self.optimizer, self.topology.names[-1]),
            gather_updated=along(self.update_route, self.weights, self.optimizer),
        )

    def levels(self, below: str | None, upto: str | None) -> tuple[str, ...]:
        """Levels above `below` (None: from the innermost on) up to and with `upto` (None: none)."""
        return self.topology.names[self.depth(below) : self.depth(upto)]
