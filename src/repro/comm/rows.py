"""Rows that go to whom they concern: an all-to-all of as many rows as there are, and an all-gather of them.

Ranks do not know how many rows others have for them, so the numbers travel first (`tell`) and the rows after. Nothing is
padded: only what has to crosses a link.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from repro.comm.exchange import Hop, Works
from repro.comm.links import Links, finish
from repro.comm.route import flat, hierarchical


def pack(values: Tensor, labels: Tensor) -> Tensor:
    """Float [n, width] and integers below 2^31, [n, count], as rows of bytes, uint8 [n, ..]: one message instead of two."""
    parts = (values.contiguous(), labels.to(torch.int32).contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


def unpack(rows: Tensor, dtype: torch.dtype, labels: int) -> tuple[Tensor, Tensor]:
    """Inverse of `pack` for values of `dtype` and `labels` integers a row (int64)."""
    values, integers = rows.tensor_split([rows.shape[1] - 4 * labels], dim=1)
    # Flat first: a lone row keeps the stride of the whole, which `view` refuses.
    values, integers = values.flatten().view(dtype), integers.flatten().view(torch.int32)
    width = (rows.shape[1] - 4 * labels) // dtype.itemsize
    return values.view(len(rows), width), integers.view(len(rows), labels).long()


class Rows:
    """Exchanges of rows, [n, width] of any dtype, between all ranks of `links`, whose ledger counts what they send."""

    def __init__(self, links: Links) -> None:
        self.links, self.ranks, self.rank = links, dist.get_world_size(), dist.get_rank()
        self._hop = links.hops(flat(links.topology))[0] if self.ranks > 1 else None
        self._levels = hierarchical(links.topology, 32)
        links.connect([self._levels])

    def tell(self, counts: Tensor) -> Tensor:
        """`counts[r]`, int64 [ranks], goes to rank r; returns what each rank told this one."""
        ones = [1] * self.ranks
        return self.all_to_all(counts[:, None], ones, ones)[:, 0]

    def all_to_all(self, rows: Tensor, counts: list[int], coming: list[int]) -> Tensor:
        """Rows sorted by destination, `counts[r]` of them for rank r; returns those from each rank r, `coming[r]`, in rank order."""
        assert len(rows) == sum(counts), f"{len(rows)} rows for {counts}"
        out = rows.new_empty(sum(coming), *rows.shape[1:])
        if self._hop is not None and self._hop.native:
            dist.all_to_all_single(out, rows, coming, counts)
            for peer, count in enumerate(counts):
                self.links.ledger.count(peer, count * rows.shape[1] * rows.element_size())
            return out
        parts, places = rows.split(counts), out.split(coming)
        places[self.rank].copy_(parts[self.rank])
        if self._hop is not None:
            finish(self._messages(parts, places))
        return out

    def _messages(self, parts: tuple[Tensor, ...], places: tuple[Tensor, ...]) -> Iterator[Works]:
        others = [peer for peer in range(self.ranks) if peer != self.rank]
        yield self._hop._transfer([(parts[p], p, 0) for p in others], [(places[p], p, 0) for p in others])

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in rank order, on every rank. Level by level from the slowest, so a row crosses each slow link once."""
        if self._hop is None:
            return rows
        counts = self.tell(torch.full((self.ranks,), len(rows), device=rows.device)).tolist()
        if self._hop.native:
            full = [rows.new_empty(count, *rows.shape[1:]) for count in counts]
            dist.all_gather(full, rows)
            self.links.ledger.count(
                (self.rank + 1) % self.ranks, (sum(counts) - counts[self.rank]) * rows.shape[1] * rows.element_size()
            )
            return torch.cat(full)
        held = {self.rank: rows}  # by the rank that they came from
        for hop in reversed(self.links.hops(self._levels)):
            held |= finish(self._share(hop, held, counts))
        return torch.cat([held[rank] for rank in range(self.ranks)])

    def _share(self, hop: Hop, held: dict[int, Tensor], counts: list[int]) -> Iterator[Works]:
        """Exchange all that is held with the peers of one level: what they hold came from ranks as far from them as ours from us."""
        peers = {p: dist.get_global_rank(hop.group, p) for p in range(hop.size) if p != hop.group.rank()}
        sources = {p: [source + there - self.rank for source in held] for p, there in peers.items()}
        mine = torch.cat(list(held.values()))
        coming = {p: mine.new_empty(sum(counts[s] for s in sources[p]), *mine.shape[1:]) for p in peers}
        yield hop._transfer([(mine, p, 0) for p in peers], [(place, p, 0) for p, place in coming.items()])
        parts = {p: place.split([counts[s] for s in sources[p]]) for p, place in coming.items()}
        return {s: part for p in peers for s, part in zip(sources[p], parts[p], strict=True)}
