"""Probe the network on its ranks, and fit."""

import torch._dynamo  # (AdamW imports it on first use: once here, not in every rank)

from repro import launch, quantize
from repro.experiments.base import Outcome
from repro.experiments.common.probe.fitted import fitted
from repro.experiments.common.probe.ranks import cases, probe
from repro.experiments.fabric_probe import TIMEOUT_S, FabricProbe
from repro.launch import network


def run(point: FabricProbe) -> Outcome:
    """Measure, fit every second size, and predict the others. The series can be given to `repro.scaling.fit`."""
    quantize.warm_up()
    topology = point.topology
    wanted = cases(topology, [point.largest_kib * 1024 // 4**k for k in reversed(range(5))])
    with network.between(topology, point.fabric) as links:
        probes = launch.launch(
            *(probe, topology.world_size, topology, wanted, point.repeats),
            fabric=links.fabric,
            topology=topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    native, host = torch.cuda.is_available(), links.state != "the machine's own"
    found = fitted(topology, wanted, probes, native, host)
    series = found.table.assign(hop=["+".join(hop) for hop in found.table.hop]).drop(columns="sizes")
    return Outcome(
        metrics=found.metrics,
        evidence=links.evidence,
        conditions={"fabric": links.state},
        series=series,
        topology=point.describe(links.state),
    )
