"""One hop of a route: its peers, what goes over the wire, the all-gather and the reduction over it, and a ledger.

The exchanges are generators: each yields when its messages are on their way, and goes on when they have arrived. Who
drives one may compute meanwhile (`repro.comm.pending.Pending`).

On gloo they are point-to-point: its reduce-scatter moves twice the bytes, and its all-to-all runs half-duplex unless
every receive is posted before the first send. Other backends (NCCL, RCCL) use their own collectives, on their streams.
"""

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from repro import quantize
from repro.topology import Topology


class ExchangeError(RuntimeError):
    """Messages of other ranks did not come in the time of their process group, or the connection is gone. What was
    being exchanged is incomplete, and the group is of no further use."""


@dataclass(frozen=True)
class Event:
    """A round of messages of this rank, for a timeline. `label`: that of its collective; `levels`: those of the hop;
    `nbytes`: sent; seconds of `time.perf_counter`, which all processes of a machine share."""

    label: int
    levels: tuple[str, ...]
    nbytes: int
    start: float
    end: float


class Ledger:
    """Payload bytes that this rank sent, per level of the link that joins it to the receiver.

    Counts tensors only: not TCP/IP headers, and not scalars such as the gradient norm. Where a backend has its own
    collectives, gathers and reductions count as rings, an all-to-all as direct messages. Sum over ranks for the traffic
    of a step.

    events   None; set to a list, it collects an `Event` per round of messages (not of backends' own collectives)
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology, self.rank = topology, rank
        self.sent = dict.fromkeys(topology.names, 0)
        self.events: list[Event] | None = None

    def count(self, peer: int, nbytes: int, sent: dict[str, int] | None = None) -> None:
        """Book `nbytes` sent to global rank `peer`, in the period that `sent` is of (default: the present one)."""
        if level := self.topology.level_between(self.rank, peer):
            (self.sent if sent is None else sent)[level] += nbytes

    def take(self) -> dict[str, int]:
        """Bytes per level since the last call, and start again from zero: call it once per step.

        A collective counts where it was started: what is still under way goes on adding to the dictionary returned.
        """
        sent, self.sent = self.sent, dict.fromkeys(self.topology.names, 0)
        return sent


@dataclass(frozen=True)
class Running:
    """The collective that a thread is at: its label, the tags of its messages, and where the ledger counts them."""

    label: int
    tags: Callable[[], int]
    sent: dict[str, int]


@dataclass
class Round:
    """Messages that were started together."""

    works: list[dist.Work]
    levels: tuple[str, ...]
    nbytes: int
    label: int
    ledger: Ledger
    start: float

    def arrive(self) -> None:
        """Wait for them. ExchangeError when they do not come."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise ExchangeError(
                "messages of other ranks did not come: a rank has ended, or does something else since an exception "
                f"that it survived ({error})"
            ) from error
        if self.ledger.events is not None:
            end = time.perf_counter()
            self.ledger.events.append(Event(self.label, self.levels, self.nbytes, self.start, end))


Steps = Generator[Round, None, Tensor]  # yields what to wait for, returns the result
# Threads send one round after the other: torch does not promise that a process group may be used by several at once.
_sending = threading.Lock()


@dataclass(frozen=True)
class Hop:
    """One hop as this rank sees it: its peers, the rings and the wire format.

    `rings`: group ranks from this one on, so that messages go to [1] and come from [-1]; empty for a direct exchange.
    """

    group: dist.ProcessGroup
    levels: tuple[str, ...]
    rings: list[tuple[int, ...]]
    bits: int
    block: int
    ledger: Ledger
    running: Callable[[], Running]  # the collective that asks
    device: str = "cpu"

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def native(self) -> bool:
        """Whether the backend's own collectives are used: all but gloo's."""
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return backends[self.device] != "gloo"

    @property
    def others(self) -> list[int]:
        """Group ranks of the peers."""
        return [peer for peer in range(self.size) if peer != self.group.rank()]

    def encode(self, x: Tensor) -> Tensor:
        """Values [.., n] to what goes over the wire."""
        if self.bits < 16:
            return quantize.quantize(x, self.bits, self.block)
        return x.bfloat16() if self.bits == 16 and x.element_size() > 2 else x

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Payload [.., m] back to [.., numel] values, rounded to the wire format; into `out` where that is given."""
        if self.bits < 16:
            return quantize.dequantize(payload, numel, self.bits, self.block, dtype, out)
        if out is None or out.data_ptr() == payload.data_ptr():
            return payload.to(dtype)
        return out.copy_(payload)

    def add(self, payload: Tensor, total: Tensor) -> None:
        """Add the values of a payload to `total`, fp32 of their shape."""
        if self.bits < 16:
            quantize.accumulate(payload, total, self.bits, self.block)
        else:
            total += payload

    def gather(self, payload: Tensor, full: Tensor | None = None) -> Steps:
        """Payload [m] of each rank to [size, m] in group rank order; into `full` where that is given."""
        if full is None:
            full = payload.new_empty(self.size, payload.numel())
        if self.native:
            self._count_ring(payload.numel() * payload.element_size())
            dist.all_gather_single(full.view(-1), payload, group=self.group)
            return full
        me = self.group.rank()
        full[me] = payload
        if self.rings:
            return (yield from self._ring_gather(full))
        yield self.exchange(dict.fromkeys(self.others, payload), {peer: full[peer] for peer in self.others})
        return full

    def reduce(self, chunks: Tensor) -> Steps:
        """Chunks [size, m] on each rank to the sum of the own chunk, fp32 [m]; each crosses the wire once."""
        if self.native:
            return self._native_reduce(chunks)
        if self.rings and self.bits >= 16:
            return (yield from self._ring_reduce(chunks))
        encoded = {peer: self.encode(chunks[peer]) for peer in self.others}
        received = {peer: torch.empty_like(payload) for peer, payload in encoded.items()}
        total = chunks[self.group.rank()].to(torch.float32, copy=True)
        yield self.exchange(encoded, received)
        for payload in received.values():
            self.add(payload, total)
        return total

    def _ring_gather(self, full: Tensor) -> Steps:
        parts = [row.tensor_split(len(self.rings)) for row in full]  # parts[peer][ring]
        for step in range(self.size - 1):
            sends = [(parts[order[-step]][ring], order[1], ring) for ring, order in enumerate(self.rings)]
            receives = [(parts[order[-step - 1]][ring], order[-1], ring) for ring, order in enumerate(self.rings)]
            yield self._transfer(sends, receives)
        return full

    def _ring_reduce(self, chunks: Tensor) -> Steps:
        """Partial sums travel around and each rank adds its own part."""
        sums = chunks.to(torch.float32, copy=True)
        parts = [row.tensor_split(len(self.rings)) for row in sums]  # parts[peer][ring], views
        for step in range(1, self.size):
            sends, receives, targets = [], [], []
            for ring, order in enumerate(self.rings):
                payload, target = self.encode(parts[order[-step]][ring]), parts[order[-step - 1]][ring]
                sends.append((payload, order[1], ring))
                receives.append((payload.new_empty(target.numel()), order[-1], ring))
                targets.append(target)
            yield self._transfer(sends, receives)
            for (payload, _, _), target in zip(receives, targets, strict=True):
                target += payload
        return sums[self.group.rank()]

    def _native_reduce(self, chunks: Tensor) -> Tensor:
        """By the backend's collectives: reduce-scatter, or all-to-all of quantised payloads and a local sum."""
        encoded, me = self.encode(chunks), self.group.rank()
        nbytes_per_peer = encoded[0].numel() * encoded.element_size()
        if self.bits >= 16:
            self._count_ring(nbytes_per_peer)
            total = torch.empty_like(encoded[0])
            dist.reduce_scatter_single(total, encoded.view(-1), group=self.group)
            return total.float()
        received = torch.empty_like(encoded)
        dist.all_to_all_single(received.view(-1), encoded.view(-1), group=self.group)
        total = chunks[me].to(torch.float32, copy=True)
        for peer, payload in enumerate(received):
            if peer != me:
                self._count(dist.get_global_rank(self.group, peer), nbytes_per_peer)
                self.add(payload, total)
        return total

    def exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> Round:
        """Start messages to and from peers, by their group rank."""
        return self._transfer([(t, p, 0) for p, t in sends.items()], [(t, p, 0) for p, t in receives.items()])

    def _transfer(self, sends: list[tuple[Tensor, int, int]], receives: list[tuple[Tensor, int, int]]) -> Round:
        """Start messages (tensor, group rank of the peer, ring), all at once; both sides leave out empty ones."""
        running, to_global = self.running(), partial(dist.get_global_rank, self.group)
        tag, start, nbytes = running.tags(), time.perf_counter(), 0
        with _sending:
            # Receives first: gloo announces "ready to receive" behind bulk data already queued to that peer, which
            # would serialise the two directions of a link.
            started = [
                dist.irecv(t, to_global(p), group=self.group, tag=tag + ring) for t, p, ring in receives if t.numel()
            ]
            for tensor, peer, ring in sends:
                if tensor.numel():
                    started.append(dist.isend(tensor, to_global(peer), group=self.group, tag=tag + ring))
                    nbytes += tensor.nbytes
                    self.ledger.count(to_global(peer), tensor.nbytes, running.sent)
        works = [work for work in started if work is not None]  # None: of a rank outside the group
        return Round(works, self.levels, nbytes, running.label, self.ledger, start)

    def _count_ring(self, nbytes_per_peer: int) -> None:
        """Book a collective that the backend runs by itself as a ring, like NCCL: everything goes to the next rank."""
        following = dist.get_global_rank(self.group, (self.group.rank() + 1) % self.size)
        self._count(following, (self.size - 1) * nbytes_per_peer)

    def _count(self, peer: int, nbytes: int) -> None:
        self.ledger.count(peer, nbytes, self.running().sent)
