"""Run a point on its ranks; and what a rank measures with."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd
import torch
import torch.distributed as dist

from repro import launch
from repro.experiments.base import Metrics, MissingHardware, Outcome
from repro.experiments.common.ranks import OnRanks
from repro.launch import network
from repro.launch.joined import place_in_job

T = TypeVar("T")
MARGIN_S = 15.0  # before the point's own limit: the launcher can tell a hang in a collective from slow work


@dataclass(frozen=True)
class Ranks:
    """The ranks of a point, with the network between them."""

    point: OnRanks
    links: network.Network
    timeout_s: float

    def run(self, work: Callable[..., T], *args: Any, last: bool = True) -> list[T]:
        """What `work(rank, world_size, *args)` returns on each. In a job all but the first end after the `last`."""
        return launch.launch(
            *(work, self.point.ranks, *args),
            fabric=self.links.fabric,
            topology=self.point.topology,
            timeout_s=self.timeout_s - MARGIN_S,
            first_only=last,
        )

    def outcome(self, metrics: Metrics, series: pd.DataFrame | None = None, **also: str) -> Outcome:
        """Of what was measured on this network; `also`: further conditions."""
        state = self.links.state
        return Outcome(metrics, self.links.evidence, {"fabric": state} | also, series, self.point.describe(state))


@contextlib.contextmanager
def ranks_of(point: OnRanks, timeout_s: float) -> Iterator[Ranks]:
    """The point's ranks, for as long as their network stands; `timeout_s`: limit of a run of the experiment."""
    with network.between(point.topology, point.fabric) as links:
        yield Ranks(point, links, timeout_s)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What `work` returns, and its seconds on this rank; all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    found = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


def need_device(device: str) -> None:
    """MissingHardware where the device is cuda and there is none."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MissingHardware("device is cuda, and torch sees no CUDA or ROCm GPU")


def gpu_of_job() -> str:
    """Device of this rank: in a job its GPU, where there is one; ranks that `launch` starts here share the CPU."""
    return "cuda" if place_in_job() is not None and torch.cuda.is_available() else "cpu"
