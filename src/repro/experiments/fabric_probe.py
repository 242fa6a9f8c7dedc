"""What the network of this machine or allocation does: times of gathers and reductions over every level, and the latency and rate of each
that they amount to."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from repro.experiments import _probe
from repro.experiments.base import Experiment, Outcome, Point, Shape
from repro.experiments.zero_train import ZeroTrain

if TYPE_CHECKING:
    from repro.topology import Topology

TIMEOUT_S = 900.0


class FabricProbe(Point):
    """Ranks: nodes * packages * gcds. The rates are those of the emulated network, for machines that have one."""

    nodes: int = Field(2, ge=1)
    packages: int = Field(2, ge=1, description="GPU packages per node")
    gcds: int = Field(2, ge=1, description="ranks per package")
    largest_kib: int = Field(1024, ge=64, description="largest tensor; four smaller ones, a quarter each time")
    repeats: int = Field(5, ge=1)
    cluster_mbit_s: float = Field(25.0, gt=0, description="inter-node rate per rank with all ranks busy")
    package_ratio: float = Field(16.0, gt=0)
    node_ratio: float = Field(4.0, gt=0)
    fabric: Literal["auto", "unshaped"] = "auto"

    @property
    def topology(self) -> "Topology":
        """Sizes and rates of the levels."""
        names = ("nodes", "packages", "gcds", "cluster_mbit_s", "package_ratio", "node_ratio")
        return ZeroTrain(**{name: getattr(self, name) for name in names}).topology


def run(point: FabricProbe) -> Outcome:
    """Measure, fit every second size, and predict the others. The series can be given to `repro.scaling.fit`."""
    import torch._dynamo  # (AdamW imports it on first use: once here, not in every rank)

    from repro import launch, quantize
    from repro.experiments import _probe_ranks
    from repro.launch import network

    quantize.warm_up()

    topology = point.topology
    cases = _probe_ranks.cases(topology, [point.largest_kib * 1024 // 4**k for k in reversed(range(5))])
    with network.between(topology, point.fabric) as links:
        probes = launch.launch(
            *(_probe_ranks.probe, topology.world_size, topology, cases, point.repeats),
            fabric=links.fabric,
            topology=topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    found = _probe.fitted(
        topology, cases, probes, native=torch.cuda.is_available(), host=links.state != "the machine's own"
    )
    series = found.table.assign(hop=["+".join(hop) for hop in found.table.hop]).drop(columns="sizes")
    return Outcome(
        metrics=found.metrics,
        evidence=links.evidence,
        conditions={"fabric": links.state},
        series=series,
        topology=f"{point.nodes} nodes x {point.packages} packages x {point.gcds} GCDs, {links.state}",
    )


def label(point: FabricProbe) -> str:
    """Short name of a point for its record file."""
    end = "-unshaped" if point.fabric == "unshaped" else ""
    return f"{point.nodes}x{point.packages}x{point.gcds}-{point.cluster_mbit_s:g}mbit{end}"


EXPERIMENT = Experiment(
    summary="Latency and rate of every level of the network, by collectives of several sizes",
    parameters=FabricProbe,
    run=run,
    label=label,
    reports=_probe.REPORTS | {"fabric"},
    shape=lambda point: Shape(point.nodes, point.packages, point.gcds),
    timeout_s=TIMEOUT_S,
)
