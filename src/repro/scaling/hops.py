"""What a hop of a collective of a plan takes: processors, links, quantising and restoring."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from repro.scaling import collectives
from repro.scaling.algorithms import Algorithm, Kind
from repro.scaling.assumptions import Assumptions
from repro.scaling.machines import Machine
from repro.scaling.network import Links, Network, Value
from repro.zero import traffic

# Per value that is quantised: read in 16 bits, written in 8; and per value that is restored, the other way round.
QUANTIZE_BYTES = 3


class Cost(NamedTuple):
    """Seconds of a hop.

    latency    what it takes without a byte: a launch, a latency for each message of the longest chain, and the start of
               a message to each further rank
    moving     of processors that move and add up what is sent, where they do so
    links      of the busiest links
    quantize   of quantising and restoring
    """

    latency: Value
    moving: Value
    links: Value
    quantize: Value


def hop_seconds(hop: traffic.Hop, machine: Machine, assumed: Assumptions) -> Cost:
    """What a hop takes. NCCL and RCCL use rings; `repro.comm` does over several levels, and within one level it
    exchanges directly. A quantised reduction is a direct all-to-all, and a sum at the receiver."""
    alone, nbytes = _alone(machine.network), hop.ranks * hop.payload
    empty, full = (_seconds(hop, size, alone.processors, machine) for size in (0, nbytes))
    share, links = _share(hop, assumed), _seconds(hop, nbytes, alone.links, machine)
    apart = assumed.scales_apart if hop.bits < 16 else 0.0
    # The same bytes in more messages: each costs what an empty one does.
    sent = (assumed.messages * (1 + apart) * empty, (full - empty) / share, links / share)
    values, kernels = hop.quantised + hop.restored, (hop.quantised > 0) + (hop.restored > 0)
    if machine.quantize_values_per_s is None:
        streamed = values * QUANTIZE_BYTES / machine.hbm_bytes_per_s
        work = assumed.quantize_slowdown * streamed + assumed.messages * kernels * machine.launch_s
        return Cost(*sent, work)
    return Cost(*sent, assumed.quantize_slowdown * values / machine.quantize_values_per_s)


def level_seconds(hop: traffic.Hop, machine: Machine, assumed: Assumptions) -> dict[str, Value]:
    """How long the links of each level carry messages of a hop."""
    levels = zip(machine.topology.names, _alone(machine.network).levels, strict=True)
    nbytes, share = hop.ranks * hop.payload, _share(hop, assumed)
    return {name: _seconds(hop, nbytes, alone, machine) / share for name, alone in levels if name in hop.levels}


def _seconds(hop: traffic.Hop, nbytes: int, network: Network, machine: Machine) -> Value:
    """Of the hop's collective with tensors of `nbytes`, on a `network` of the machine's levels."""
    kind: Kind = "all_gather" if hop.kind == "gather" else "all_to_all" if hop.bits < 16 else "reduce_scatter"
    algorithm: Algorithm = "ring" if hop.in_rings(machine.native) else "direct"
    return collectives.seconds(kind, nbytes, network, algorithm, levels=hop.levels, channels=machine.channels)


def _share(hop: traffic.Hop, assumed: Assumptions) -> Value:
    """Of the bandwidth, what the hop's messages reach."""
    return assumed.all_to_all if hop.kind == "reduce" and hop.bits < 16 else 1.0


class _Alone(NamedTuple):
    """A network whose links take no time, one in which nothing but the links does, and for each level one in which
    nothing but its links does."""

    processors: Network
    links: Network
    levels: tuple[Network, ...]


@lru_cache(maxsize=16)
def _alone(network: Network) -> _Alone:
    def every(**change: Any) -> tuple[Links, ...]:
        return tuple(
            replace(links, protocols=tuple(replace(each, **change) for each in links.protocols))
            for links in network.links
        )

    endless, instant = every(bytes_per_s=np.inf), every(latency_s=0.0)
    nothing = every(bytes_per_s=np.inf, latency_s=0.0)
    levels = ((*nothing[:i], one, *nothing[i + 1 :]) for i, one in enumerate(instant))
    alone = (Network(network.topology, links) for links in levels)
    return _Alone(replace(network, links=endless), Network(network.topology, instant), tuple(alone))
