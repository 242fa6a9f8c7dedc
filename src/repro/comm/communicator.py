"""Collectives over the levels of a machine, as this rank runs them along a `Route`.

`all_gather` walks the hops from the outermost to the innermost, so what crosses the slow link is one shard per rank and
the fast links multiply it. `reduce_scatter` walks from the innermost to the outermost, so only sums leave a unit.
Chunk j of a full tensor always belongs to the j-th rank of the unit, whichever route is taken.
"""

import itertools
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from repro.comm.exchange import Hop, Ledger, Round, Running, Steps
from repro.comm.pending import Pending, Stream
from repro.comm.route import Route, most_under_way, ring_orders
from repro.topology import Topology

# A message's tag says what is sent (label), in which collective of that label, and in which of its rounds. Collectives
# and rounds wrap around; gloo takes 31 bits.
_LABELS, _COLLECTIVES, _ROUNDS = 1 << 11, 1 << 6, 1 << 14
_UNLABELLED = _LABELS - 1
# Collectives by label, of all communicators over one default process group: the groups of two may be the same, and then
# only these numbers keep messages of the one from those of the other.
_started: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[int]] = weakref.WeakKeyDictionary()


class Communicator:
    """This rank's process groups over runs of consecutive levels, and the collectives on them.

    Groups are made on first use, so all ranks must ask for the same runs in the same order (they follow the same plan).
    Raises ValueError when the topology's world size is not that of the default process group.
    """

    def __init__(self, topology: Topology, device: str = "cpu") -> None:
        if topology.world_size != dist.get_world_size():
            raise ValueError(f"topology has {topology.world_size} ranks, the process group {dist.get_world_size()}")
        self.topology, self.device = topology, device
        self.ledger = Ledger(topology, dist.get_rank())
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._hops: dict[Route, list[Hop]] = {}
        everybody = dist.group.WORLD
        assert everybody is not None, "its size was asked for"
        self._everybody, self._started = everybody, _started.setdefault(everybody, Counter())
        if device != "cpu":
            init_device_mesh(device, (topology.world_size,))  # takes the GPU of LOCAL_RANK where none is current yet
        # The groups of `init_device_mesh` have torch's own time-out, whatever that of the default process group is.
        options = everybody._get_backend(torch.device(device)).options  # None of a fake one, which waits for nobody
        self._patience = options and options._timeout
        self._unlabelled_tags = self._tags(_UNLABELLED, 0)
        self._of_thread = threading.local()  # `running`: the collective that it is at

    def mesh(self, levels: tuple[str, ...]) -> DeviceMesh:
        """1-D mesh of the ranks that differ from this one in `levels` only; ValueError unless levels are consecutive,
        innermost first."""
        if levels not in self._meshes:
            sizes = [level.size for level in self.topology.levels]
            first = self.topology.index(levels[0]) if levels else 0
            last = first + len(levels)
            if self.topology.names[first:last] != levels:
                raise ValueError(f"{levels} are not consecutive levels, innermost first, of {self.topology.names}")
            inside, unit, world = math.prod(sizes[:first]), math.prod(sizes[:last]), math.prod(sizes)
            starts = (start for outer in range(0, world, unit) for start in range(outer, outer + inside))
            members = [list(range(start, start + unit, inside)) for start in starts]
            group = self._everybody
            if len(members) > 1:
                group, _ = dist.new_subgroups_by_enumeration(members, timeout=self._patience)
            self._meshes[levels] = DeviceMesh.from_group(group, self.device)
        return self._meshes[levels]

    def hops(self, route: Route | None) -> list[Hop]:
        """Hops of a route with this rank's groups, innermost first; a hop over a single rank is left out."""
        if route is None:
            return []
        if route not in self._hops:
            hops = []
            for levels, bits in zip(route.hops, route.bits, strict=True):
                sizes = [level.size for level in self.topology.levels if level.name in levels]
                if math.prod(sizes) > 1:
                    group = self.mesh(levels).get_group()
                    starts = [(order, order.index(group.rank())) for order in ring_orders(sizes)]
                    rings = [order[start:] + order[:start] for order, start in starts]
                    hops.append(Hop(group, levels, rings, bits, route.block, self.ledger, self._running, self.device))
            self._hops[route] = hops
        return self._hops[route]

    def stream(self, *routes: Route | None) -> Stream:
        """A stream for collectives along `routes`; each stays at least a round of messages behind the one before it."""
        hops = [hop for route in routes for hop in self.hops(route)]
        inline = not hops or any(hop.native for hop in hops)
        return Stream(most_under_way(self.topology, *routes), inline)

    @property
    def position(self) -> int:
        """Collectives that this rank has labelled, by all communicators: equal on ranks that are at the same place of
        one program."""
        return self._started.total()

    def labelled(self, label: int, steps: Generator[Round, None, Any]) -> Generator[Round, None, Any]:
        """`steps`, whose messages meet only those that other ranks send with the same label: ranks that are not at the
        same place wait for each other, and never take one tensor for another. (On gloo; NCCL goes by order alone.)"""
        label %= _UNLABELLED
        number = self._started[label]
        self._started[label] += 1
        return self._run(Running(label, self._tags(label, number), self.ledger.sent), steps)

    def _run(self, running: Running, steps: Generator[Round, None, Any]) -> Generator[Round, None, Any]:
        while True:
            before = getattr(self._of_thread, "running", None)
            self._of_thread.running = running
            try:
                round_ = next(steps)
            except StopIteration as end:
                return end.value
            finally:
                self._of_thread.running = before
            yield round_

    def _running(self) -> Running:
        """What the calling thread is at. Exchanges without a label go by their order."""
        if (running := getattr(self._of_thread, "running", None)) is not None:
            return running
        return Running(_UNLABELLED, self._unlabelled_tags, self.ledger.sent)

    def _tags(self, label: int, number: int) -> Callable[[], int]:
        """Tags for one round after the other: as many apart as there may be rings."""
        rings = max(level.size for level in self.topology.levels)
        # Tag 0, which messages of others have that say none, is among those without a label.
        apart = (label + 1) % _LABELS
        first = (apart * _COLLECTIVES + number % _COLLECTIVES) * _ROUNDS
        rounds = itertools.count()
        return lambda: first + next(rounds) * rings % (_ROUNDS - rings)

    def all_gather(self, shard: Tensor, route: Route | None, out: Tensor | None = None) -> Tensor:
        """Flat shard [n] of every rank to [ranks * n] in rank order, same dtype; with `out` into that tensor, of which
        `shard` may be this rank's part.

        Every rank gets the same bits: on a quantised hop the own shard is rounded like everybody else's, so that
        replicas of the weights never drift apart. Between hops of equal bits a payload is not decoded. ExchangeError
        when messages of other ranks do not come.
        """
        return Pending(self.gathering(shard, route, out)).wait()

    def reduce_scatter(self, full: Tensor, route: Route | None) -> Tensor:
        """Flat [ranks * n] of every rank, of any float dtype, to the sum over ranks of the own chunk, fp32 [n].

        A quantised hop rounds what comes from others; a rank's own contribution never crosses a link and is not
        rounded. A ring at 16 bits rounds partial sums at every step. Raises ValueError when the ranks of the route do
        not divide the tensor, ExchangeError when messages of other ranks do not come.
        """
        return Pending(self.reducing(full, route)).wait()

    def gathering(self, shard: Tensor, route: Route | None, out: Tensor | None = None) -> Steps:
        """`all_gather` step by step, for `Pending`."""
        hops, numel, dtype = self.hops(route), shard.numel(), shard.dtype
        if out is None:
            out = shard.new_empty(math.prod(hop.size for hop in hops) * numel)
        if not numel:
            return out
        pieces, wire = shard.contiguous()[None], None  # [pieces, payload]; the hop that encoded them
        for hop in reversed(hops):
            if wire is None or wire.bits != hop.bits:
                pieces = hop.encode(pieces if wire is None else wire.decode(pieces, numel, dtype))
                wire = hop
            direct = out.view(-1, numel) if len(hops) == 1 and pieces.dtype == dtype else None
            pieces = (yield from hop.gather(pieces.reshape(-1), direct)).view(-1, pieces.shape[1])
        if wire is not None and len(hops) == 1:  # rank order already
            wire.decode(pieces, numel, dtype, out.view(-1, numel))
            return out
        if wire is not None:
            pieces = wire.decode(pieces, numel, dtype)
        inner_first = pieces.view(*(hop.size for hop in hops), numel)
        out.view(*reversed(inner_first.shape[:-1]), numel).copy_(_reversed_dims(inner_first))
        return out

    def reducing(self, full: Tensor, route: Route | None) -> Steps:
        """`reduce_scatter` step by step, for `Pending`."""
        hops = self.hops(route)
        sizes = [hop.size for hop in hops]
        if full.numel() % math.prod(sizes):
            raise ValueError(f"{math.prod(sizes)} ranks do not divide a tensor of {full.numel()} values")
        rank_order = full.reshape(*reversed(sizes), full.numel() // math.prod(sizes))
        current = _reversed_dims(rank_order).contiguous()
        for hop in hops:
            chunks = current.view(hop.size, -1)
            chunks = chunks.float() if hop.bits == 32 else chunks  # sums are fp32, and 32 bits send them so
            current = yield from hop.reduce(chunks)
        return current.view(-1).float()

    def all_reducing(self, full: Tensor, route: Route | None) -> Steps:
        """Sum over the ranks of the route, [n] to fp32 [n], the same bits on all: reduce-scatter, then all-gather. Both
        use the route's wire format, so at fewer than 32 bits the sum itself is rounded once more."""
        ranks = math.prod(hop.size for hop in self.hops(route))
        padded = F.pad(full, (0, -full.numel() % ranks))
        total = yield from self.reducing(padded, route)
        everywhere = yield from self.gathering(total, route)
        return everywhere[: full.numel()]


def _reversed_dims(x: Tensor) -> Tensor:
    """[a, b, .., n] to [.., b, a, n]: between rank order (outermost first) and the order in which hops split."""
    return x.permute(*reversed(range(x.dim() - 1)), x.dim() - 1)
