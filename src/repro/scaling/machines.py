"""Machines, as far as they are known: an uncertain parameter is an interval with a likely value (`Interval`).

`Hardware` is a kind of machine (those of `machines.toml` are the catalogue), and `Hardware.machine` makes the `Machine`
of a number of nodes, at the likely values or in draws, so that a prediction is a band. The same seed draws the same
values for every plan and size, so ratios of predictions have bands too.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from repro.scaling.network import Links, Network, Protocol, Value
from repro.topology import Level, Topology


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, most likely `likely`. ValueError unless 0 <= low <= likely <= high, and 0 < high."""

    low: float
    likely: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.likely <= self.high or not self.high:
            raise ValueError(f"an interval needs 0 <= low <= likely <= high and 0 < high, found {self}")

    def draw(self, rng: np.random.Generator, draws: int) -> Value:
        """[draws] values, log-triangular, or triangular from 0 on. ValueError where low equals high."""
        if not self.low:
            return rng.triangular(0.0, self.likely, self.high, draws)
        return np.exp(rng.triangular(math.log(self.low), math.log(self.likely), math.log(self.high), draws))

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}, likely {self.likely:g}"


@dataclass(frozen=True)
class Tier:
    """A level of a machine.

    size          units of the level below in one of this level; 0 for the outermost: as many as the caller asks for
    links         out of each of those units
    bytes_per_s   of one link in one direction, nominal
    achieved      share of it that is achieved
    latency_s     of a message

    Where the level's switches add up and multicast (NVLS, SHARP; 0: they cannot):

    in_network_share       of the achieved rate that such a collective reaches
    in_network_latency_s   of it
    """

    name: str
    size: int
    links: int
    bytes_per_s: float
    achieved: Interval
    latency_s: Interval
    in_network_share: float = 0.0
    in_network_latency_s: float = 0.0


@dataclass(frozen=True)
class Hardware:
    """A kind of machine, of any number of nodes.

    tiers          its levels, innermost first
    peak_flops     of one rank, dense, 16 bits
    memory_bytes   of one rank
    gemm           share of the peak that large matrix products reach
    hbm            bytes per second that memory-bound kernels reach
    launch_s       of a kernel
    peer_s         between the starts of two messages of a rank in an all-to-all
    overlap        share of the compute behind which messages can hide
    channels       rings side by side; 0: one per link
    values         parameters that `at` fixed, by name

    ValueError unless the outermost tier, and no other, leaves its size open.
    """

    name: str
    tiers: tuple[Tier, ...]
    peak_flops: float
    memory_bytes: float
    gemm: Interval
    hbm: Interval
    launch_s: Interval
    peer_s: Interval
    overlap: Interval
    channels: int = 0
    values: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = [tier.size for tier in self.tiers]
        if not sizes or sizes[-1] or min(sizes[:-1], default=1) < 1:
            raise ValueError(f"{self.name}: tiers have sizes {sizes}, allowed: 0 for the last one, else at least 1")

    def intervals(self) -> dict[str, Interval]:
        """The uncertain parameters by name."""
        names = ("gemm", "hbm", "launch_s", "peer_s", "overlap")
        found: dict[str, Interval] = {name: getattr(self, name) for name in names}
        for tier in self.tiers:
            found |= {f"{tier.name} achieved": tier.achieved, f"{tier.name} latency_s": tier.latency_s}
        return found

    def at(self, **values: Value) -> "Hardware":
        """The same machine with some parameters of `intervals` fixed, or [draws] of them given. ValueError for a name
        that is not one of them."""
        if unknown := values.keys() - self.intervals().keys():
            raise ValueError(f"{self.name}: unknown {min(unknown)!r}, known: {', '.join(self.intervals())}")
        return replace(self, values={**self.values, **values})

    def topology(self, nodes: int) -> Topology:
        """Levels of a machine of `nodes`; the rate of a level is the nominal share of a rank with all ranks busy."""
        levels, below = [], 1
        for tier in self.tiers:
            size = tier.size or nodes
            levels.append(Level(tier.name, size, tier.links * tier.bytes_per_s / below, tier.latency_s.likely))
            below *= size
        return Topology(tuple(levels))

    def machine(self, nodes: int, draws: int = 0, seed: int = 0) -> "Machine":
        """A machine of `nodes`, at the likely values or in `draws` of all uncertain parameters."""
        values: dict[str, Value] = {}
        for name, interval in self.intervals().items():
            values[name] = self.values.get(name, interval.likely)
            if draws and name not in self.values and interval.low < interval.high:
                # A random stream of its own for each parameter: fixing one does not move the others.
                values[name] = interval.draw(np.random.default_rng([seed, *name.encode()]), draws)
        links = []
        for tier in self.tiers:
            rate = tier.bytes_per_s * values[f"{tier.name} achieved"]
            share = tier.in_network_share
            switch = Protocol(tier.in_network_latency_s, share * rate) if share else None
            links.append(Links(tier.links, (Protocol(values[f"{tier.name} latency_s"], rate),), switch))
        return Machine(
            network=Network(self.topology(nodes), tuple(links), overhead_s=values["launch_s"], peer_s=values["peer_s"]),
            flops_per_s=self.peak_flops * values["gemm"],
            hbm_bytes_per_s=values["hbm"],
            launch_s=values["launch_s"],
            overlap=values["overlap"],
            memory_bytes=self.memory_bytes,
            channels=self.channels or None,
        )


@dataclass(frozen=True, eq=False)
class Machine:
    """A machine of one size, as predictions compute with it. Parameters are numbers, or arrays [draws].

    flops_per_s             that large matrix products reach on a rank
    hbm_bytes_per_s         that memory-bound kernels reach on a rank
    launch_s                of a kernel
    overlap                 share of the compute behind which messages can hide
    memory_bytes            of a rank
    channels                rings side by side; None: as many as the level with the most links has
    quantize_values_per_s   values that a rank quantises, or restores; None: as fast as its memory allows
    native                  collectives are those of NCCL or RCCL; else those of `repro.comm`
    """

    network: Network
    flops_per_s: Value
    hbm_bytes_per_s: Value
    launch_s: Value
    overlap: Value
    memory_bytes: float = math.inf
    channels: float | None = None
    quantize_values_per_s: Value | None = None
    native: bool = True

    @property
    def topology(self) -> Topology:
        return self.network.topology


def _intervals(table: dict[str, Any]) -> dict[str, Any]:
    return {key: Interval(*value) if isinstance(value, list) else value for key, value in table.items()}


def _catalogue() -> dict[str, Hardware]:
    tables = tomllib.loads(Path(__file__).with_name("machines.toml").read_text())
    found = {}
    of_all = tables.pop("all")
    for name, table in tables.items():
        whole = of_all | tables.get(table.pop("like", ""), {}) | table
        tiers = tuple(Tier(**_intervals(tier)) for tier in whole.pop("tiers"))
        found[name] = Hardware(name, tiers, **_intervals(whole))
    return found


CATALOGUE = _catalogue()


def hardware(name: str) -> Hardware:
    """The machine of this name in the catalogue. ValueError lists the names."""
    if name not in CATALOGUE:
        raise ValueError(f"unknown hardware {name!r}, known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
