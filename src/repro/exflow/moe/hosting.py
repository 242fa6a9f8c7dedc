"""Which rank holds which expert, which copy of it takes a row, and how experts move between ranks in mid-stream."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from repro.comm.row_exchange import RowExchange
from repro.exflow.serving.slots import Replicas, logical_to_physical, physical_to_logical
from repro.models.gpt_moe import GPTMoEConfig, MoEBlock

Dispatch = Literal["nearest", "round_robin"]


@dataclass(frozen=True)
class Layout:
    """The expert and the rank of every slot, int64 [layers, slots]; ranks ascend along a row. A rank may have any
    number of slots, an expert one or more (copies)."""

    expert: np.ndarray
    rank: np.ndarray

    @classmethod
    def of(cls, placed: np.ndarray | Replicas, config: GPTMoEConfig, ranks: int) -> "Layout":
        """Of a placement, int [layers, experts] as `Placement.gpu`, or of one with copies. ValueError when it does not
        fit the model and the ranks."""
        if isinstance(placed, Replicas):
            expert = placed.physical_to_logical
            rank = np.broadcast_to(np.arange(expert.shape[1]) // placed.slots_per_gpu, expert.shape)
            found = (len(expert), placed.num_experts, placed.gpus)
            if found != (config.layers, config.experts, ranks):
                raise ValueError(
                    f"slots for {_shape(*found)}, must be for {_shape(config.layers, config.experts, ranks)}"
                )
            return cls(expert, rank)
        fits = placed.shape == (config.layers, config.experts) and placed.dtype.kind in "iu"
        if not fits or placed.min() < 0 or placed.max() >= ranks:
            raise ValueError(
                f"a placement {placed.dtype} {placed.shape} on ranks {placed.min()} to {placed.max()}: the model has "
                f"{config.layers} layers of {config.experts} experts, and there are {ranks} ranks"
            )
        return cls(physical_to_logical(placed), np.sort(placed, axis=1))


def _shape(layers: int, experts: int, ranks: int) -> str:
    return f"{layers} layers of {experts} experts on {ranks} ranks"


class Hosting:
    """What rank `exchange.rank` knows of all experts, and the weights of its own, in `blocks`.

    `dispatch`, for experts with copies: `nearest` takes one on this rank, else the nearest by the levels of the
    machine, `round_robin` any. This rank splits its rows for an expert among the copies that are left, evenly, or in
    proportion to its `shares`, float [layers, slots]; within one call a copy gets its part to the next whole row.
    """

    def __init__(self, blocks: Sequence[MoEBlock], layout: Layout, exchange: RowExchange, dispatch: Dispatch) -> None:
        self.blocks, self.exchange, self.dispatch = blocks, exchange, dispatch
        topology, self.rank = exchange.communicator.topology, exchange.rank
        between = [[topology.level_between(a, b) for b in range(exchange.ranks)] for a in range(exchange.ranks)]
        self._away = np.array([[-1 if name is None else topology.index(name) for name in row] for row in between])
        for block, expert, rank in zip(blocks, layout.expert, layout.rank, strict=True):
            kept = torch.from_numpy(expert[rank == self.rank]).to(block.experts.up.device)
            _hold(block, block.experts.up.data[kept], block.experts.down.data[kept])
        self._look_up(layout, None)

    def _look_up(self, layout: Layout, shares: np.ndarray | None) -> None:
        """Take `layout`, with tables that a decoding rank reads, on the model's device. ValueError for shares that do not
        fit; then nothing is taken."""
        expert, rank = layout.expert, layout.rank
        layer, own = np.arange(len(expert))[:, None], self._away[self.rank]
        away = own[rank] if self.dispatch == "nearest" else np.zeros_like(rank)
        least = np.full((len(expert), expert.max() + 1), away.max())
        np.minimum.at(least, (layer, expert), away)
        shares = np.ones(expert.shape) if shares is None else shares
        if shares.shape != expert.shape or not (np.isfinite(shares).all() and (shares >= 0).all()):
            raise ValueError(
                f"shares are {shares.dtype} {shares.shape}, must be {expert.shape}, finite and not negative"
            )
        weight = np.where(away == least[layer, expert], shares, 0.0)
        physical, copies = logical_to_physical(expert)
        until = np.where(physical >= 0, weight[layer[..., None], physical], 0.0).cumsum(axis=2)
        if len(without := np.argwhere(until[..., -1] <= 0)):
            raise ValueError(f"layer {without[0, 0]}: no copy of expert {without[0, 1]} that may be taken has a share")
        until /= until[..., -1:]
        until[until > 1 - 1e-9] = np.inf  # a row is never beyond the last copy that has a share
        begins = np.stack([np.searchsorted(row, row) for row in rank])  # the first slot of a slot's rank
        device = self.blocks[0].experts.up.device
        self.layout, self.several = layout, int(copies.max()) > 1
        self._physical, self._until = torch.from_numpy(physical).to(device), torch.from_numpy(until).to(device)
        self.expert, self.host = torch.from_numpy(expert).to(device), torch.from_numpy(rank.copy()).to(device)
        self.local = torch.from_numpy(np.arange(expert.shape[1]) - begins).to(device)  # of a slot within its rank

    def slots(self, layer: int, experts: Tensor) -> Tensor:
        """The slot that each of `experts`, int64 [..] in `layer`, is taken from for rows of this rank."""
        if not self.several:
            return self._physical[layer, experts, 0]
        chosen = experts.flatten()
        rows = chosen.bincount(minlength=self._physical.shape[1])
        order = chosen.argsort(stable=True)
        number = torch.empty_like(chosen)  # of a row among those of its expert
        number[order] = torch.arange(len(chosen), device=chosen.device) - (rows.cumsum(0) - rows)[chosen[order]]
        # Ranks begin at different points of the same scale, so that together they share out evenly as well.
        at = (number + (self.rank + 0.5) / self.exchange.ranks) / rows[chosen]
        copy = (self._until[layer, chosen] <= at[:, None]).sum(dim=1)
        return self._physical[layer, chosen, copy].view_as(experts)

    def move(self, layout: Layout, shares: np.ndarray | None = None) -> int:
        """Take `layout` instead, the same on all ranks, which call this together between iterations; weights come from
        the nearest rank that has them, layer by layer. Returns how many experts came to this rank over the network."""
        came, old = 0, self.layout
        self._look_up(layout, shares)
        for layer, block in enumerate(self.blocks):
            had, gets = (
                set(zip(own.expert[layer].tolist(), own.rank[layer].tolist(), strict=True)) for own in (old, layout)
            )
            moves = _moves(had, gets, self._away)
            came += sum(destination == self.rank for _, destination, _ in moves)
            held, wanted = (own.expert[layer][own.rank[layer] == self.rank].tolist() for own in (old, layout))
            self._move(block, held, wanted, moves)
        return came

    def _move(self, block: MoEBlock, held: list[int], wanted: list[int], moves: list[tuple[int, int, int]]) -> None:
        """Send and receive experts of one layer by `moves`, (source, destination, expert), and hold those `wanted` in
        place of those `held`."""
        up, down = block.experts.up.data, block.experts.down.data
        rows = torch.cat([up.flatten(1), down.flatten(1)], dim=1)
        if moves:
            away = sorted((there, expert) for here, there, expert in moves if here == self.rank)
            coming = sorted((here, expert) for here, there, expert in moves if there == self.rank)
            counts, arriving = (Counter(rank for rank, _ in each) for each in (away, coming))
            ranks = range(self.exchange.ranks)
            leaving = rows[[held.index(expert) for _, expert in away]]
            arrived = self.exchange.all_to_all(leaving, [counts[r] for r in ranks], [arriving[r] for r in ranks])
            rows, held = torch.cat([rows, arrived]), held + [expert for _, expert in coming]
        rows = rows[[held.index(expert) for expert in wanted]]
        first, second = rows.split([up.flatten(1).shape[1], down.flatten(1).shape[1]], dim=1)
        _hold(block, first.view(-1, *up.shape[1:]), second.view(-1, *down.shape[1:]))


def _hold(block: MoEBlock, up: Tensor, down: Tensor) -> None:
    block.experts.up, block.experts.down = nn.Parameter(up.contiguous()), nn.Parameter(down.contiguous())


def _moves(had: set[tuple[int, int]], gets: set[tuple[int, int]], away: np.ndarray) -> list[tuple[int, int, int]]:
    """(source, destination, expert) of every expert of one layer that a rank `gets` and has not `had`, both as (expert,
    rank). The source is the nearest rank that has it, of those the one that has sent the least."""
    sent, moves = Counter[int](), []
    for expert, there in sorted(gets - had):
        holders = [rank for other, rank in had if other == expert]
        here = min(holders, key=lambda rank: (away[there, rank], sent[rank], rank))
        sent[here] += 1
        moves.append((here, there, expert))
    return moves
