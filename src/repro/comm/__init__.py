"""Collectives on flat tensors over the levels of a `Topology`: direct, ring, hierarchical, quantised; and a ledger.

A `Route` says how one kind of message travels (`route.py`): hops, innermost first, each over one or several consecutive
levels and with its own number of bits. Two routes matter for ZeRO:

    flat            (package + node + cluster)       one hop over all ranks, in several rings as NCCL and RCCL do
    hierarchical    package | node | cluster         a collective per level: the slow link carries each byte once

`communicator.py` walks a route with this rank's process groups, `exchange.py` is one hop and the ledger, `pending.py`
has collectives under way while the program computes.
"""

from repro.comm.communicator import Communicator
from repro.comm.exchange import Event, ExchangeError, Hop, Ledger
from repro.comm.pending import Pending, Stream
from repro.comm.route import BLOCK, Route, flat, hierarchical, most_under_way

__all__ = [
    "BLOCK",
    "Communicator",
    "Event",
    "ExchangeError",
    "Hop",
    "Ledger",
    "Pending",
    "Route",
    "Stream",
    "flat",
    "hierarchical",
    "most_under_way",
]
