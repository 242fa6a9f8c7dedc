"""Collectives on flat tensors over the levels of a `Topology`: direct, ring and hierarchical, quantised or not, and a ledger.

A `Route` says how one kind of message travels: a sequence of hops, innermost first, each over one or several consecutive
levels and with its own number of bits. Two routes matter for ZeRO:

    flat            (package + node + cluster)       one ring over all ranks, as NCCL and RCCL do
    hierarchical    package | node | cluster         a collective per level: the slow link carries each byte once

`all_gather` walks the hops from the outermost to the innermost, so what crosses the slow link is one shard per rank and the
fast links multiply it. `reduce_scatter` walks from the innermost to the outermost, so only sums leave a unit.
Chunk j of a full tensor always belongs to the j-th rank of the unit, whichever route is taken.

On gloo the exchanges are point-to-point: its reduce-scatter moves twice the bytes, and its all-to-all runs half-duplex
unless every receive is posted before the first send. Other backends (NCCL, RCCL) use their own collectives.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from repro import quantize
from repro.topology import Topology

BITS = (32, 16, *quantize.BITS)


@dataclass(frozen=True)
class Route:
    """Hops from the innermost to the outermost, each a run of consecutive levels, and the bits of a value on each hop.

    32 and 16 send the value as it is, at most as wide as its own dtype (16 turns fp32 into bf16); 8 and 4 send blocks of
    `block` values as integers with a scale. A hop over one level is a direct exchange; a hop over several levels is a ring,
    except that a quantised reduce-scatter is a one-shot all-to-all (a ring would quantise a sum again at every step).
    """

    hops: tuple[tuple[str, ...], ...]
    bits: tuple[int, ...]
    block: int = 256

    def __post_init__(self) -> None:
        if not self.hops or not all(self.hops) or len(self.hops) != len(self.bits):
            raise ValueError(f"a route needs hops of at least one level and bits for each, found {self}")
        if wrong := [bits for bits in self.bits if bits not in BITS]:
            raise ValueError(f"bits {wrong[0]} is not a wire format, allowed: {', '.join(map(str, BITS))}")
        if self.block < 1:
            raise ValueError(f"block is {self.block}, must be at least 1")

    def within(self, levels: Sequence[str]) -> "Route | None":
        """The part of this route that runs over `levels`; None when nothing is left."""
        kept = [(tuple(v for v in hop if v in levels), bits) for hop, bits in zip(self.hops, self.bits, strict=True)]
        kept = [(hop, bits) for hop, bits in kept if hop]
        return Route(tuple(h for h, _ in kept), tuple(b for _, b in kept), self.block) if kept else None


def flat(topology: Topology, bits: int = 16, block: int = 256) -> Route:
    """One hop over all levels."""
    return Route((topology.names,), (bits,), block)


def hierarchical(topology: Topology, bits: int | Sequence[int] = 16, block: int = 256) -> Route:
    """One hop per level; `bits` for all of them or one value per level, innermost first."""
    per_level = (bits,) * len(topology.names) if isinstance(bits, int) else tuple(bits)
    return Route(tuple((name,) for name in topology.names), per_level, block)


class Ledger:
    """Payload bytes that this rank sent, per level of the link that joins it to the receiver.

    Counts tensors only: not TCP/IP headers, and not scalars such as the gradient norm. On backends with collectives of their
    own, a ring is assumed. Sum over ranks for the traffic of a step.
    """

    def __init__(self, topology: Topology, rank: int) -> None:
        self.topology, self.rank = topology, rank
        self.sent = dict.fromkeys(topology.names, 0)

    def count(self, peer: int, nbytes: int) -> None:
        """Book `nbytes` sent to global rank `peer`."""
        if level := self.topology.level_between(self.rank, peer):
            self.sent[level] += nbytes

    def take(self) -> dict[str, int]:
        """Bytes per level since the last call, and start again from zero: call it once per step."""
        sent, self.sent = self.sent, dict.fromkeys(self.topology.names, 0)
        return sent


@dataclass(frozen=True)
class Hop:
    """One collective of a route as this rank sees it: its peers, the ring orders (of group ranks) and the wire format."""

    group: dist.ProcessGroup
    rings: tuple[tuple[int, ...], ...]  # empty: direct exchange
    bits: int
    block: int
    device: str = "cpu"

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def native(self) -> bool:
        """Whether the backend's own collectives are used: all but gloo's."""
        backends = dict(pair.split(":") for pair in dist.get_backend_config(self.group).split(","))
        return backends[self.device] != "gloo"

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


class Links:
    """This rank's process groups over runs of consecutive levels, and the collectives on them.

    Groups are made on first use, so all ranks must ask for the same runs in the same order (they follow the same plan).
    Raises ValueError when the topology's world size is not that of the default process group.
    """

    def __init__(self, topology: Topology, ledger: Ledger | None = None, device: str = "cpu") -> None:
        if topology.world_size != dist.get_world_size():
            raise ValueError(f"topology has {topology.world_size} ranks, the process group {dist.get_world_size()}")
        self.topology, self.device = topology, device
        self.ledger = ledger or Ledger(topology, dist.get_rank())
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    def mesh(self, levels: tuple[str, ...]) -> DeviceMesh:
        """1-D mesh of the ranks that differ from this one in `levels` only; levels are consecutive, innermost first."""
        if levels not in self._meshes:
            sizes = [level.size for level in self.topology.levels]
            first = self.topology.index(levels[0]) if levels else 0
            last = first + len(levels)
            if self.topology.names[first:last] != levels:
                raise ValueError(f"{levels} are not consecutive levels, innermost first, of {self.topology.names}")
            shape = (math.prod(sizes[last:]), math.prod(sizes[first:last]), math.prod(sizes[:first]))
            mesh = init_device_mesh(self.device, shape, mesh_dim_names=("outside", "levels", "inside"))
            self._meshes[levels] = mesh["levels"]
        return self._meshes[levels]

    def hops(self, route: Route | None) -> list[Hop]:
        """Hops of a route with this rank's groups, innermost first; a hop over a single rank is left out."""
        hops = []
        for levels, bits in zip(route.hops, route.bits, strict=True) if route else ():
            sizes = [self.topology.levels[self.topology.index(name)].size for name in levels]
            if math.prod(sizes) > 1:
                hops.append(Hop(self.mesh(levels).get_group(), ring_orders(sizes), bits, route.block, self.device))
        return hops

    def connect(self, routes: Iterable[Route | None]) -> None:
        """Make the groups of these routes."""
        for route in routes:
            self.hops(route)

    def all_gather(self, shard: Tensor, route: Route | None, out: Tensor | None = None) -> Tensor:
        """Flat shard [n] of every rank to [ranks * n] in rank order, same dtype; with `out` into that tensor, of which `shard`
        may be this rank's part.

        Every rank gets the same bits: on a quantised hop the own shard is rounded like everybody else's, so that replicas of
        the weights never drift apart. Between hops of equal bits a payload travels on without being decoded.
        """
        hops, numel, dtype = self.hops(route), shard.numel(), shard.dtype
        if out is None:
            out = shard.new_empty(math.prod(hop.size for hop in hops) * numel)
        pieces, wire = shard[None], None  # [pieces, payload], encoded as `wire` does
        for hop in reversed(hops):
            if wire is None or wire.bits != hop.bits:
                pieces = hop.encode(pieces if wire is None else wire.decode(pieces, numel, dtype))
                wire = hop
            direct = out.view(-1, numel) if len(hops) == 1 and pieces.dtype == dtype else None
            pieces = _gather(pieces.reshape(-1), hop, self.ledger, direct).view(-1, pieces.shape[1])
        if len(hops) == 1:  # rank order already
            wire.decode(pieces, numel, dtype, out.view(-1, numel))
            return out
        if wire is not None:
            pieces = wire.decode(pieces, numel, dtype)
        inner_first = pieces.view(*(hop.size for hop in hops), numel)
        out.view(*reversed(inner_first.shape[:-1]), numel).copy_(_reversed_dims(inner_first))
        return out

    def reduce_scatter(self, full: Tensor, route: Route | None) -> Tensor:
        """Flat [ranks * n] of every rank, of any float dtype, to the fp32 sum over ranks of the own chunk, [n].

        A quantised hop rounds what comes from others; a rank's own contribution never crosses a link and is not rounded.
        Raises ValueError when the ranks of the route do not divide the tensor.
        """
        hops = self.hops(route)
        sizes = [hop.size for hop in hops]
        if full.numel() % math.prod(sizes):
            raise ValueError(f"{math.prod(sizes)} ranks do not divide a tensor of {full.numel()} values")
        rank_order = full.view(*reversed(sizes), full.numel() // math.prod(sizes))
        current = _reversed_dims(rank_order).contiguous()
        for hop in hops:
            chunks = current.view(hop.size, -1)
            chunks = chunks.float() if hop.bits == 32 else chunks  # sums are fp32, and 32 bits send them so
            ring = hop.rings and hop.bits >= 16 and not hop.native
            current = (_ring_reduce if ring else _reduce)(chunks, hop, self.ledger)
        return current.view(-1).float()

    def all_reduce(self, full: Tensor, route: Route | None) -> Tensor:
        """Sum over the ranks of the route, [n] to [n]: a reduce-scatter, then an all-gather; all ranks get the same bits."""
        ranks = math.prod(hop.size for hop in self.hops(route))
        padded = F.pad(full, (0, -full.numel() % ranks))
        return self.all_gather(self.reduce_scatter(padded, route), route)[: full.numel()].to(full.dtype)


def _reversed_dims(x: Tensor) -> Tensor:
    """[a, b, .., n] to [.., b, a, n]: between rank order (outermost coordinate first) and the order in which hops split."""
    return x.permute(*reversed(range(x.dim() - 1)), x.dim() - 1)


def ring_orders(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cyclic orders of the group ranks of a hop over levels of `sizes` (innermost first); none for a single level.

    A single ring leaves every outer unit through the same inner unit, so one NIC would carry all of a node's traffic. There
    is one ring per inner unit, each leaving through another one, and each carries its share of the tensor (NCCL's channels).
    """
    sizes = [size for size in sizes if size > 1]
    if len(sizes) < 2:
        return ()
    inside, unit = math.prod(sizes[:-1]), math.prod(sizes[:-2])
    return tuple(
        tuple(o * inside + (i + ring * unit) % inside for o in range(sizes[-1]) for i in range(inside))
        for ring in range(sizes[-2])
    )


def _transfer(
    sends: list[tuple[Tensor, int, int]], receives: list[tuple[Tensor, int, int]], hop: Hop, ledger: Ledger
) -> None:
    """Point-to-point messages (tensor, group rank of the peer, tag), all at once. Empty messages are left out on both sides."""
    to_global = partial(dist.get_global_rank, hop.group)
    # Receives first: gloo announces "ready to receive" behind bulk data already queued to that peer, which would
    # serialise the two directions of a link.
    works = [dist.irecv(t, to_global(p), group=hop.group, tag=tag) for t, p, tag in receives if t.numel()]
    for tensor, peer, tag in sends:
        if tensor.numel():
            works.append(dist.isend(tensor, to_global(peer), group=hop.group, tag=tag))
            ledger.count(to_global(peer), tensor.numel() * tensor.element_size())
    for work in works:
        work.wait()


def _count_native(nbytes_per_peer: int, hop: Hop, ledger: Ledger) -> None:
    """Book a collective that the backend runs by itself as a ring, like NCCL: everything goes to the next rank."""
    following = dist.get_global_rank(hop.group, (hop.group.rank() + 1) % hop.size)
    ledger.count(following, (hop.size - 1) * nbytes_per_peer)


def _gather(payload: Tensor, hop: Hop, ledger: Ledger, full: Tensor | None = None) -> Tensor:
    """Payload [m] of each peer to [peers, m] in group rank order; into `full` where that is given."""
    me, peers = hop.group.rank(), range(hop.size)
    if full is None:
        full = payload.new_empty(hop.size, payload.numel())
    if hop.native:
        _count_native(payload.numel() * payload.element_size(), hop, ledger)
        dist.all_gather_single(full.view(-1), payload, group=hop.group)
        return full
    full[me] = payload
    if not hop.rings:
        others = [peer for peer in peers if peer != me]
        _transfer([(payload, p, 0) for p in others], [(full[p], p, 0) for p in others], hop, ledger)
        return full
    parts = [row.tensor_split(len(hop.rings)) for row in full]  # parts[peer][ring]
    for step in range(hop.size - 1):
        sends, receives = [], []
        for tag, order in enumerate(hop.rings):
            at = order.index(me)
            here, before = order[(at - step) % hop.size], order[(at - step - 1) % hop.size]
            sends.append((parts[here][tag], order[(at + 1) % hop.size], tag))
            receives.append((parts[before][tag], order[at - 1], tag))
        _transfer(sends, receives, hop, ledger)
    return full


def _reduce(chunks: Tensor, hop: Hop, ledger: Ledger) -> Tensor:
    """Chunks [peers, m] of each peer to the fp32 sum [m] of the own chunk; each contribution crosses the wire once."""
    me = hop.group.rank()
    others = [peer for peer in range(hop.size) if peer != me]
    if hop.native:
        return _reduce_native(chunks, hop, ledger)
    encoded = {peer: hop.encode(chunks[peer]) for peer in others}
    received = {peer: torch.empty_like(payload) for peer, payload in encoded.items()}
    _transfer([(encoded[p], p, 0) for p in others], [(received[p], p, 0) for p in others], hop, ledger)
    total = chunks[me].to(torch.float32, copy=True)
    for payload in received.values():
        hop.add(payload, total)
    return total


def _reduce_native(chunks: Tensor, hop: Hop, ledger: Ledger) -> Tensor:
    """`_reduce` by the backend's collectives: reduce-scatter, or all-to-all of quantised payloads and a local sum."""
    encoded = hop.encode(chunks)
    nbytes_per_peer = encoded[0].numel() * encoded.element_size()
    if hop.bits >= 16:
        _count_native(nbytes_per_peer, hop, ledger)
        total = torch.empty_like(encoded[0])
        dist.reduce_scatter_single(total, encoded.view(-1), group=hop.group)
        return total.float()
    for peer in range(hop.size):
        if peer != hop.group.rank():
            ledger.count(dist.get_global_rank(hop.group, peer), nbytes_per_peer)
    received = torch.empty_like(encoded)
    dist.all_to_all_single(received.view(-1), encoded.view(-1), group=hop.group)
    total = chunks[hop.group.rank()].to(torch.float32, copy=True)
    for peer, payload in enumerate(received):
        if peer != hop.group.rank():
            hop.add(payload, total)
    return total


def _ring_reduce(chunks: Tensor, hop: Hop, ledger: Ledger) -> Tensor:
    """Like `_reduce`, as a ring: partial sums travel around and each rank adds its own part."""
    me, sums = hop.group.rank(), chunks.to(torch.float32, copy=True)
    parts = [row.tensor_split(len(hop.rings)) for row in sums]  # parts[peer][ring], views
    for step in range(hop.size - 1):
        sends, receives, targets = [], [], []
        for tag, order in enumerate(hop.rings):
            at = order.index(me)
            leaving, coming = order[(at - step - 1) % hop.size], order[(at - step - 2) % hop.size]
            payload = hop.encode(parts[leaving][tag])
            sends.append((payload, order[(at + 1) % hop.size], tag))
            receives.append((payload.new_empty(parts[coming][tag].numel()), order[at - 1], tag))
            targets.append(parts[coming][tag])
        _transfer(sends, receives, hop, ledger)
        for (payload, _, _), target in zip(receives, targets, strict=True):
            target += payload
    return sums[me]
