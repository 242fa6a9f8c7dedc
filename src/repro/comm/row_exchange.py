"""Variable-length all-to-all and all-gather of rows.

Ranks do not know how many rows others have for them. gloo takes a message that is shorter than the buffer it is
received into, so there a message of `deliver` begins with its number of rows. In `all_gather`, and on other backends,
the numbers travel first. Nothing is padded.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from repro.comm.communicator import Communicator
from repro.comm.exchange import Hop
from repro.comm.route import flat, hierarchical

_HEADER = 8  # bytes


def pack(values: Tensor, labels: Tensor) -> Tensor:
    """Float [n, width] and integers below 2^31, [n, count], as rows of bytes, uint8 [n, ..]: one message for both."""
    parts = (values.contiguous(), labels.to(torch.int32).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpack(rows: Tensor, dtype: torch.dtype, labels: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack` for values of `dtype` and `labels` integers a row (int64)."""
    parts = rows.tensor_split([rows.shape[1] - 4 * labels], dim=1)
    # Cloned: `view` refuses the strides of a part, and `contiguous` leaves those of a lone row as they are.
    values, integers = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return values.view(dtype), integers.view(torch.int32).long()


class RowExchange:
    """Exchanges of rows, [n, width] of any dtype, between all ranks; the communicator's ledger counts them."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator, self.ranks, self.rank = communicator, dist.get_world_size(), dist.get_rank()
        self._hop = communicator.hops(flat(communicator.topology))[0] if self.ranks > 1 else None
        self._levels = communicator.hops(hierarchical(communicator.topology, 32))

    def deliver(self, rows: Tensor, counts: Tensor, most: int) -> tuple[Tensor, list[int]]:
        """An all-to-all of rows, uint8, whose numbers only their senders know.

        rows     sorted by destination, `counts[r]` (int64 [ranks]) of them for rank r
        most     no rank has more rows for another than this; the same on all ranks

        Returns the rows that came, in the order of their senders, and how many each rank sent.
        """
        there = counts.tolist()
        assert len(rows) == sum(there) and max(there) <= most, f"{len(rows)} rows for {there}, at most {most} each"
        if self._hop is None or self._hop.native:
            coming = self._tell(counts).tolist()
            return self.all_to_all(rows, there, coming), coming
        width = rows.shape[1]
        header = counts[:, None].contiguous().view(torch.uint8)  # of the message to each rank: its number of rows
        parts = [torch.cat([head, part.flatten()]) for head, part in zip(header, rows.split(there), strict=True)]
        places = [rows.new_empty(_HEADER + most * width) if p != self.rank else parts[p] for p in range(self.ranks)]
        self._exchange(parts, places)
        coming = [int(place[:_HEADER].view(torch.int64)) for place in places]
        bodies = [p[_HEADER : _HEADER + n * width].view(n, width) for p, n in zip(places, coming, strict=True)]
        return torch.cat(bodies), coming

    def _tell(self, counts: Tensor) -> Tensor:
        """`counts[r]`, int64 [ranks], goes to rank r; returns what each rank told this one."""
        ones = [1] * self.ranks
        return self.all_to_all(counts[:, None], ones, ones)[:, 0]

    def all_to_all(self, rows: Tensor, counts: list[int], coming: list[int]) -> Tensor:
        """Rows sorted by destination, `counts[r]` for rank r; returns `coming[r]` from each rank r, in order."""
        assert len(rows) == sum(counts), f"{len(rows)} rows for {counts}"
        rows = rows.contiguous()  # what is sent has to be
        out = rows.new_empty(sum(coming), *rows.shape[1:])
        if self._hop is not None and self._hop.native:
            dist.all_to_all_single(out, rows, coming, counts)
            for peer, count in enumerate(counts):
                self.communicator.ledger.count(peer, count * _row_bytes(rows))
            return out
        parts, places = rows.split(counts), out.split(coming)
        places[self.rank].copy_(parts[self.rank])
        if self._hop is not None:
            self._exchange(parts, places)
        return out

    def _exchange(self, parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
        assert self._hop is not None, "a rank alone has nobody to send to"
        others = self._hop.others
        self._hop.exchange({p: parts[p] for p in others}, {p: places[p] for p in others}).arrive()

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows [n, ..] of each rank to those of all, in rank order, same dtype. On gloo the slowest level goes
        first, so a row crosses each slow link once."""
        if self._hop is None:
            return rows
        counts = self._tell(torch.full((self.ranks,), len(rows), device=rows.device)).tolist()
        if self._hop.native:
            full = [rows.new_empty(count, *rows.shape[1:]) for count in counts]
            dist.all_gather(full, rows)
            others = sum(counts) - counts[self.rank]
            self.communicator.ledger.count((self.rank + 1) % self.ranks, others * _row_bytes(rows))
            return torch.cat(full)
        held = {self.rank: rows}  # by the rank that they came from
        for hop in reversed(self._levels):
            held |= self._share(hop, held, counts)
        return torch.cat([held[rank] for rank in range(self.ranks)])

    def _share(self, hop: Hop, held: dict[int, Tensor], counts: list[int]) -> dict[int, Tensor]:
        """Exchange all rows held with the peers of one level; returns what they held, by the rank it came from.

        A peer holds rows from the ranks that are as far from it as the sources of ours are from this rank.
        """
        distance = {p: dist.get_global_rank(hop.group, p) - self.rank for p in hop.others}
        sources = {p: [source + away for source in held] for p, away in distance.items()}
        mine = torch.cat(list(held.values()))
        coming = {p: mine.new_empty(sum(counts[s] for s in sources[p]), *mine.shape[1:]) for p in hop.others}
        hop.exchange(dict.fromkeys(hop.others, mine), coming).arrive()
        parts = {p: place.split([counts[s] for s in sources[p]]) for p, place in coming.items()}
        return {s: part for p in hop.others for s, part in zip(sources[p], parts[p], strict=True)}


def _row_bytes(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()
