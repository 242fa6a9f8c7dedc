"""Machines, as far as they are known: a parameter is an interval from the worst that is achieved to the data sheet.

`Hardware` is a kind of machine, and `Hardware.machine` makes the `Machine` of a number of nodes, at the likely values
or in draws. A draw takes every parameter from its interval (log-triangular: low, likely, high), so a prediction is a
band. The same seed draws the same values for every plan and size, so the ratio of two predictions has the band of the
ratio.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from repro.scaling.network import Links, Network, Protocol, Value
from repro.topology import Level, Topology


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, most likely `likely`. ValueError unless 0 < low <= likely <= high."""

    low: float
    likely: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.likely <= self.high:
            raise ValueError(
                f"an interval needs 0 < low <= likely <= high, found {self.low}, {self.likely}, {self.high}"
            )

    def draw(self, rng: np.random.Generator, draws: int) -> Value:
        """[draws] values, log-triangular. ValueError where low equals high."""
        return np.exp(rng.triangular(math.log(self.low), math.log(self.likely), math.log(self.high), draws))


@dataclass(frozen=True)
class Tier:
    """A level of a machine.

    size          units of the level below in one of this level; 0 for the outermost: as many as the caller asks for
    links         out of each of those units
    bytes_per_s   of one link in one direction, nominal
    achieved      share of it that is achieved
    latency_s     of a message
    """

    name: str
    size: int
    links: int
    bytes_per_s: float
    achieved: Interval
    latency_s: Interval


@dataclass(frozen=True)
class Hardware:
    """A kind of machine, of any number of nodes.

    tiers          its levels, innermost first
    peak_flops     of one rank, dense, 16 bits
    memory_bytes   of one rank
    gemm           share of the peak that large matrix products reach
    hbm            bytes per second that memory-bound kernels reach
    launch_s       of a kernel
    overlap        share of the compute behind which messages can hide
    channels       rings side by side; 0: one per link
    values         parameters that `at` fixed, by name
    """

    name: str
    tiers: tuple[Tier, ...]
    peak_flops: float
    memory_bytes: float
    gemm: Interval
    hbm: Interval
    launch_s: Interval
    overlap: Interval
    channels: int = 0
    values: Mapping[str, float] = field(default_factory=dict)

    def intervals(self) -> dict[str, Interval]:
        """The uncertain parameters by name."""
        found = {"gemm": self.gemm, "hbm": self.hbm, "launch_s": self.launch_s, "overlap": self.overlap}
        for tier in self.tiers:
            found |= {f"{tier.name} achieved": tier.achieved, f"{tier.name} latency_s": tier.latency_s}
        return {name: interval for name, interval in found.items() if interval.low < interval.high}

    def at(self, **values: float) -> "Hardware":
        """The same machine with some parameters of `intervals` fixed. ValueError for a name that is not one of them."""
        if unknown := values.keys() - self.intervals().keys():
            known = ", ".join(self.intervals())
            raise ValueError(f"{self.name}: unknown parameter {sorted(unknown)[0]!r}, known: {known}")
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

        def value(name: str, interval: Interval) -> Value:
            if name in self.values or not draws or interval.low == interval.high:
                return self.values.get(name, interval.likely)
            # A random stream of its own for each parameter: fixing one does not move the others.
            return interval.draw(np.random.default_rng([seed, *name.encode()]), draws)

        def links(tier: Tier) -> Links:
            rate = tier.bytes_per_s * value(f"{tier.name} achieved", tier.achieved)
            return Links(tier.links, (Protocol(value(f"{tier.name} latency_s", tier.latency_s), rate),))

        launch_s = value("launch_s", self.launch_s)
        return Machine(
            network=Network(self.topology(nodes), tuple(map(links, self.tiers)), overhead_s=launch_s),
            flops_per_s=self.peak_flops * value("gemm", self.gemm),
            hbm_bytes_per_s=value("hbm", self.hbm),
            launch_s=launch_s,
            overlap=value("overlap", self.overlap),
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
    quantize_values_per_s   values that a rank quantises; None: as fast as its memory allows
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


# Share of a GPU's links that kernels reach: up to 0.81 on MI250X (Pearson 2023, arXiv 2302.14827); copies by one engine
# reach a quarter to a half of the pair's four links.
_FABRIC = Interval(0.5, 0.72, 0.85)
# A 200 Gbit/s Slingshot NIC. The floor is what host buffers get (our fit of Cray-MPICH on LUMI: 6 GB/s), the ceiling a
# plain stream.
_SLINGSHOT = Interval(0.3, 0.7, 0.92)
# Per message between nodes. Cray-MPICH on Slingshot-11: 3 to 10 us by our fit. RCCL starts kernels and its network
# proxy too.
_GPU_NETWORK = Interval(4e-6, 12e-6, 30e-6)
_GEMM = Interval(0.38, 0.5, 0.65)  # 22B at 38 % of peak with all its communication (arXiv 2312.12705) is a floor
_OVERLAP = Interval(0.3, 0.7, 1.0)  # [INF] streams and prefetch hide this much

FRONTIER = Hardware(  # OLCF user guide: link widths, NICs; 191.5 TFLOP/s and 1.6 TB/s per GCD
    "frontier",
    (
        Tier("package", 2, 1, 200e9, _FABRIC, Interval(2e-6, 5e-6, 12e-6)),
        # 50 GB/s is a single link; between some packages there are two.
        Tier("node", 4, 2, 50e9, Interval(0.5, 0.8, 1.3), Interval(3e-6, 6e-6, 15e-6)),
        Tier("cluster", 0, 4, 25e9, _SLINGSHOT, _GPU_NETWORK),
    ),
    peak_flops=191.5e12,
    memory_bytes=64e9,
    gemm=_GEMM,
    hbm=Interval(0.9e12, 1.2e12, 1.4e12),
    launch_s=Interval(4e-6, 7e-6, 12e-6),
    overlap=_OVERLAP,
)
# A scenario: one ring, so one NIC of a node at a time, and a slow proxy, as arXiv 2504.18658 reports of RCCL on
# Frontier. [INF] the numbers: that paper gives factors of up to 33 and 168 between libraries, not latencies.
FRONTIER_RCCL = replace(
    FRONTIER,
    name="frontier-rccl",
    channels=1,
    tiers=(*FRONTIER.tiers[:2], replace(FRONTIER.tiers[2], latency_s=Interval(15e-6, 30e-6, 80e-6))),
)
WILKES3 = Hardware(  # Cambridge: 4 A100-80GB a node, NVLink 300 GB/s, two HDR200 rails
    "wilkes3",
    (
        Tier("node", 4, 1, 300e9, Interval(0.6, 0.75, 0.85), Interval(2e-6, 4e-6, 10e-6)),
        Tier("cluster", 0, 2, 25e9, Interval(0.3, 0.75, 0.95), Interval(5e-6, 14e-6, 40e-6)),
    ),
    peak_flops=312e12,
    memory_bytes=80e9,
    gemm=Interval(0.4, 0.55, 0.7),
    hbm=Interval(1.3e12, 1.6e12, 1.85e12),
    launch_s=Interval(3e-6, 5e-6, 8e-6),
    overlap=_OVERLAP,
)
DGX_H100 = Hardware(  # NVIDIA data sheet: NVLink 450 GB/s one way, eight 400 Gbit/s NICs, 989 TFLOP/s, 3.35 TB/s
    "dgx-h100",
    (
        Tier("node", 8, 1, 450e9, Interval(0.6, 0.78, 0.9), Interval(2e-6, 4e-6, 10e-6)),
        Tier("cluster", 0, 8, 50e9, Interval(0.6, 0.85, 0.95), Interval(5e-6, 10e-6, 25e-6)),
    ),
    peak_flops=989e12,
    memory_bytes=80e9,
    gemm=Interval(0.4, 0.55, 0.7),
    hbm=Interval(2.3e12, 2.8e12, 3.1e12),
    launch_s=Interval(3e-6, 5e-6, 8e-6),
    overlap=_OVERLAP,
)
# NVIDIA data sheet: 72 GPUs on NVLink 900 GB/s one way, a 400 Gbit/s NIC each, 2.5 PFLOP/s, 8 TB/s, 186 GB.
GB200_NVL72 = Hardware(
    "gb200-nvl72",
    (
        Tier("rack", 72, 1, 900e9, Interval(0.6, 0.75, 0.9), Interval(2e-6, 4e-6, 10e-6)),
        Tier("cluster", 0, 72, 50e9, Interval(0.6, 0.85, 0.95), Interval(5e-6, 10e-6, 25e-6)),
    ),
    peak_flops=2.5e15,
    memory_bytes=186e9,
    gemm=Interval(0.35, 0.5, 0.65),
    hbm=Interval(5e12, 6.5e12, 7.4e12),
    launch_s=Interval(3e-6, 5e-6, 8e-6),
    overlap=_OVERLAP,
)
# A 3-D torus of 16 x 16 x n chips as levels (TPU v5p: 4800 Gbit/s over six links, 459 TFLOP/s, 2.76 TB/s, 95 GB). Each
# dimension is a ring with two links a chip, one per direction. Between rings all chips of a plane send at once, over
# their own links.
TORUS = Hardware(
    "tpu-like-torus",
    (
        Tier("x", 16, 2, 100e9, Interval(0.7, 0.85, 0.95), Interval(0.5e-6, 1e-6, 3e-6)),
        Tier("y", 16, 32, 100e9, Interval(0.7, 0.85, 0.95), Interval(0.5e-6, 1e-6, 3e-6)),
        Tier("z", 0, 512, 100e9, Interval(0.7, 0.85, 0.95), Interval(0.5e-6, 1e-6, 3e-6)),
    ),
    peak_flops=459e12,
    memory_bytes=95e9,
    gemm=Interval(0.45, 0.6, 0.75),
    hbm=Interval(1.9e12, 2.3e12, 2.6e12),
    launch_s=Interval(1e-6, 2e-6, 4e-6),
    overlap=_OVERLAP,
)
CATALOGUE = {v.name: v for v in (FRONTIER, FRONTIER_RCCL, WILKES3, DGX_H100, GB200_NVL72, TORUS)}


def hardware(name: str) -> Hardware:
    """The machine of this name in the catalogue. ValueError lists the names."""
    if name not in CATALOGUE:
        raise ValueError(f"unknown hardware {name!r}, known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
