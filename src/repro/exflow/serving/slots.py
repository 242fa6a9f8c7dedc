"""Experts as expert-parallel servers number their places: S slots per GPU and layer, slot s on GPU s // S.

Which copy of an expert takes a token, one of DISPATCHES:
  nearest      one on the token's own GPU, else one on its node, else any; of several equally near the (g mod their number)-th
               in GPU order, for a token on GPU g, as in SGLang's static dispatch (which draws where we count)
  round_robin  all in turn, wherever the token is: vLLM, SGLang's dynamic dispatch, and what EPLB assumes
  shares       so many to each as the placement says, by the GPU of the token: for servers that take such a table
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DISPATCHES = ("shares", "nearest", "round_robin")  # in the order of `search/joint.py`


def check_aim(objective: str, objectives: Sequence[str], costs: Sequence[float]) -> None:
    """ValueError unless the objective is one of `objectives`, and `costs` are two: in a node and between nodes."""
    if objective not in objectives:
        raise ValueError(f"unknown objective {objective!r}, allowed: {', '.join(objectives)}")
    if len(costs) != 2 or not 0 <= costs[0] <= costs[1] < math.inf:
        raise ValueError(f"costs are {tuple(costs)}, must be two, 0 <= inside a node <= between nodes")


def physical_to_logical(gpu: np.ndarray) -> np.ndarray:
    """int64 [layers, E]: the expert in each place, for `gpu`, int [layers, E], as many experts on each GPU of a layer.
    Experts of one GPU keep their order."""
    return np.argsort(gpu, axis=1, kind="stable")


def logical_to_physical(experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots of each expert in order, int64 [layers, E, most copies], -1 where it has fewer, and how many it has,
    int64 [layers, E], for the expert in each slot, `experts` int [layers, slots]."""
    layer = np.arange(len(experts))[:, None]
    counts = np.zeros((len(experts), experts.max() + 1), np.int64)
    np.add.at(counts, (layer, experts), 1)
    order = np.argsort(experts, axis=1, kind="stable")
    expert = np.take_along_axis(experts, order, axis=1)
    copy = np.arange(experts.shape[1]) - (counts.cumsum(axis=1) - counts)[layer, expert]
    slots = np.full((*counts.shape, counts.max()), -1)
    slots[layer, expert, copy] = order
    return slots, counts


def filled(hosted: np.ndarray, slots: int) -> np.ndarray:
    """int64 [layers, gpus * slots]: the expert in each slot, for the GPUs that hold each expert, `hosted` bool [layers,
    E, gpus]. Slots without a use repeat an expert of their GPU."""
    layers, _, gpus = hosted.shape
    found = np.empty((layers, gpus, slots), np.int64)
    for layer, gpu in np.ndindex(layers, gpus):
        own = np.flatnonzero(hosted[layer, :, gpu])
        found[layer, gpu] = np.concatenate([own, np.repeat(own[:1], slots - len(own))])
    return found.reshape(layers, -1)


@dataclass(frozen=True)
class Replicas:
    """`physical_to_logical`: int64 [layers, slots of all GPUs], the expert in each slot, as vLLM and SGLang number
    them: GPU g has slots g·S to (g+1)·S-1 of S = slots / gpus. GPUs of one node are consecutive. ValueError for slots
    that are not integers [layers, slots] or do not share evenly, for GPUs that do not make whole nodes, and for an
    expert (0 to the highest named) that is in no slot of a layer.

    `share`: float64 [layers, E, gpus, gpus], 0 to 1: of the tokens on a GPU that are routed to an expert, the fraction
    that goes to its copy on each GPU; None: all go to the nearest one."""

    physical_to_logical: np.ndarray
    gpus: int
    gpus_per_node: int
    share: np.ndarray | None = None

    def __post_init__(self) -> None:
        experts = self.physical_to_logical
        if experts.ndim != 2 or experts.dtype.kind not in "iu" or not experts.size:
            raise ValueError(f"slots are {experts.dtype} {experts.shape}, must be integers [layers, slots]")
        slots = experts.shape[1]
        if self.num_experts > slots:
            raise ValueError(f"expert {self.num_experts - 1} is in a slot, but {slots} slots cannot hold all before it")
        if self.gpus < 1 or slots % self.gpus:
            raise ValueError(f"{slots} slots per layer cannot be shared evenly by {self.gpus} GPUs")
        if self.gpus_per_node < 1 or self.gpus % self.gpus_per_node:
            raise ValueError(f"{self.gpus} GPUs do not make whole nodes of {self.gpus_per_node}")
        for layer, row in enumerate(self.physical_to_logical):
            missing = np.setdiff1d(np.arange(self.num_experts), row)
            if len(missing) or row.min() < 0:
                raise ValueError(f"layer {layer}: experts {missing.tolist()} are in no slot, or a slot is negative")

    @property
    def num_experts(self) -> int:
        return int(self.physical_to_logical.max()) + 1

    @property
    def slots_per_gpu(self) -> int:
        return self.physical_to_logical.shape[1] // self.gpus

    @property
    def hosted(self) -> np.ndarray:
        """bool [layers, E, gpus]: whether a GPU holds a replica of an expert."""
        layers, slots = self.physical_to_logical.shape
        hosted = np.zeros((layers, self.num_experts, self.gpus), bool)
        hosted[np.arange(layers)[:, None], self.physical_to_logical, np.arange(slots) // self.slots_per_gpu] = True
        return hosted
