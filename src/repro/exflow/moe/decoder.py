"""The decoder of one rank; `repro.exflow.moe` says what its modes are."""

from collections.abc import Callable
from typing import Literal, cast, get_args

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from repro.comm.communicator import Communicator
from repro.comm.row_exchange import RowExchange, pack, unpack
from repro.exflow.moe.cache import KeysValues
from repro.exflow.moe.hosting import Dispatch, Hosting, Layout
from repro.exflow.moe.meter import Meter
from repro.exflow.recording import RoutingCounts
from repro.exflow.serving.slots import Replicas
from repro.models.gpt_moe import GPTMoE, MoEBlock

Mode = Literal["two_all_to_alls", "coherent"]
KeysValuesMode = Literal["gathered", "shared"]
Fresh = tuple[int, Tensor, Tensor, Tensor, Tensor]  # layer, and request, position, keys, values of some tokens


class Decoder:
    """One rank's part of a GPT-MoE that decodes greedily together with all other ranks.

    model    the whole model, equal on all ranks; afterwards it holds this rank's experts only
    placed   int [layers, experts]: the rank of every expert, as `Placement.gpu`, any number of them per rank; or
             `Replicas`, in which experts have copies. `dispatch` says which copy takes a row (`hosting.py`); unlike
             in `evaluate_replicas`, rows of a rank go to equally near copies in turn
    memory   for keys_values="shared": of all requests, in the model's dtype, with `share_memory` before the ranks start

    `meter` tells where time goes, and the bytes that the ledger of `communicator` counts. `routing`, when it is set,
    counts what the routers of this rank choose. ValueError for an unknown mode, when the placement does not fit model
    and ranks, and for `memory` that is missing where keys and values are shared, or given where they are not.
    """

    def __init__(
        self,
        model: GPTMoE,
        placed: np.ndarray | Replicas,
        communicator: Communicator,
        mode: Mode = "coherent",
        keys_values: KeysValuesMode = "gathered",
        memory: KeysValues | None = None,
        dispatch: Dispatch = "nearest",
    ) -> None:
        for name, found, kind in (
            ("mode", mode, Mode),
            ("keys_values", keys_values, KeysValuesMode),
            ("dispatch", dispatch, Dispatch),
        ):
            if found not in (allowed := get_args(kind)):
                raise ValueError(f"{name} is {found!r}, allowed: {', '.join(allowed)}")
        self.ranks = dist.get_world_size()
        layout = Layout.of(placed, model.config, self.ranks)
        if (mode == "coherent" and keys_values == "shared") != (memory is not None):
            given = "given" if memory else "missing"
            raise ValueError(
                f"mode {mode}, keys_values {keys_values}, memory {given}: it belongs to coherent and shared"
            )
        self.model, self.mode, self.memory = model.eval(), mode, memory
        self.blocks = cast(list[MoEBlock], list(model.blocks))
        self.exchange, self.rank = RowExchange(communicator), dist.get_rank()
        self.device = model.head.weight.device
        self.hosting = Hosting(self.blocks, layout, self.exchange, dispatch)
        self.meter = Meter(communicator.ledger, self.device)
        self.routing: RoutingCounts | None = None

    @torch.no_grad()
    def generate(
        self, prompts: list[Tensor], new_tokens: int, after: Callable[[int], None] = lambda iteration: None
    ) -> Tensor:
        """Continuations, int64 [requests, new_tokens], of prompts int64 [any length]; both are the same on every rank.
        The home of request r is rank r · ranks // requests. `after` is called after each iteration with its number, on
        all ranks, and may `replace` experts. ValueError for no prompts or an empty one, and for more requests or tokens
        than the model or the shared memory has room for.
        """
        if not prompts:
            raise ValueError("there are no prompts, allowed: at least one")
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = int(lengths.max()) + new_tokens
        if lengths.min() < 1 or new_tokens < 1 or longest > self.model.config.seq_len:
            raise ValueError(
                f"prompts of {lengths.min()} to {lengths.max()} tokens and {new_tokens} new ones: at least 1 of each, "
                f"and at most {self.model.config.seq_len} together"
            )
        if self.memory is not None:
            requests, positions = self.memory.room
            if requests < len(prompts) or positions < longest:
                raise ValueError(
                    f"{len(prompts)} requests of up to {longest} tokens; memory has room for {requests} of {positions}"
                )
        self.requests = len(prompts)
        home = torch.arange(self.requests, device=self.device) * self.ranks // self.requests
        mine = (home == self.rank).nonzero()[:, 0]
        held = (home == self.rank) | (self.mode == "coherent")
        self.cache = self.memory or KeysValues(self.model.config, held, longest, self.model.head.weight.dtype)
        most = int(home.bincount(lengths).max())
        out = [self._prefill(prompts, lengths, mine, most)]
        for step in range(new_tokens - 1):
            with self.meter.iteration():
                out.append(self._iterate(out[-1], lengths + step, mine))
            after(step)
        return self._everywhere(mine, torch.stack(out, dim=1)[mine])

    @torch.no_grad()
    def replace(self, placed: np.ndarray | Replicas, shares: np.ndarray | None = None) -> tuple[int, dict[str, int]]:
        """Move experts to where `placed` has them; all ranks call it together, between iterations. `shares`, float
        [layers, slots], say how copies share this rank's rows (default: evenly). Returns how many experts came to this
        rank, and the bytes that it sent, by level. ValueError, and nothing is moved, as of the class and for shares of
        another shape."""
        self.meter.ledger.take()
        came = self.hosting.move(Layout.of(placed, self.model.config, self.ranks), shares)
        return came, self.meter.ledger.take()

    def _iterate(self, tokens: Tensor, position: Tensor, mine: Tensor) -> Tensor:
        """One decoding iteration: from the newest tokens of all requests, int64 [requests], at `position`, to the next.
        `mine`: the requests whose home is here. `two_all_to_alls` needs and returns only their tokens."""
        request, fresh = mine, list[Fresh]()
        x = self.model.embed(tokens[mine], position[mine])
        for layer, block in enumerate(self.blocks):
            with self.meter.part("attention"):
                q, k, v = block.attention.project(block.norm1(x))
                fresh.append((layer, request, position[request], k, v))
                self.cache.write(*fresh[-1])
                keys, values, mask = self.cache.read(layer, request, position[request])
                x = x + block.attention.mix(q[:, None], keys, values, mask)[:, 0]
            if self.mode == "two_all_to_alls":
                x = x + self._out_and_back(layer, x, -(-self.requests // self.ranks))
            else:
                x, request = self._go_and_stay(layer, x, request)
        with self.meter.part("head"):
            new = self.model.head(self.model.norm(x)).argmax(dim=-1)
        if self.mode == "two_all_to_alls":
            return tokens.index_copy(0, request, new)
        with self.meter.part("all_gather"):
            new = self._everywhere(request, new[:, None])[:, 0]
        if self.memory is None:
            with self.meter.part("all_gather_kv"):
                self._gather_keys_values(fresh)
        return new

    def _out_and_back(self, layer: int, x: Tensor, most: int) -> Tensor:
        """What the experts add to x [n, hidden]: each row goes to each of its experts, and the answers come back.
        `most`: no rank has more rows."""
        block = self.blocks[layer]
        with self.meter.part("gate"):
            h = block.norm2(x)
            _, weights, experts = block.router(h)
            self._count_routing(layer, experts)
            k = experts.shape[1]
            slots = self.hosting.slots(layer, experts).flatten()
            target = self.hosting.host[layer, slots]
            order = target.argsort(stable=True)
            there = self._counts(target)
            rows = pack(h[order // k], slots[order, None])
        with self.meter.part("all_to_all"):
            rows, back = self.exchange.deliver(rows, there, most * k)
        with self.meter.part("expert"):
            h, slots = unpack(rows, x.dtype, 1)
            self.meter.computes(layer, len(h))
            answer = block.experts(h, self.hosting.local[layer, slots[:, 0]])
        with self.meter.part("all_to_all"):
            answer = self.exchange.all_to_all(answer, back, there.tolist())
        with self.meter.part("gate"):
            answer = answer[order.argsort()].unflatten(0, (-1, k))
            return (weights.unsqueeze(-1) * answer).sum(dim=1)

    def _go_and_stay(self, layer: int, x: Tensor, request: Tensor) -> tuple[Tensor, Tensor]:
        """Rows x [n, hidden] of `request` [n] move to the rank of their heaviest expert; returns those then here. A
        copy goes to each other rank that has one of a row's experts; its part of the sum follows the row."""
        block, k = self.blocks[layer], self.model.config.top_k
        with self.meter.part("gate"):
            _, weights, experts = block.router(block.norm2(x))
            self._count_routing(layer, experts)
            slots = self.hosting.slots(layer, experts)
            target, row = self._visits(self.hosting.host[layer, slots]).T.nonzero(as_tuple=True)  # sorted by rank
            there = self._counts(target)
            rows = pack(torch.cat([x, weights], dim=1)[row], torch.cat([request[:, None], slots], dim=1)[row])
        with self.meter.part("all_to_all"):
            rows, _ = self.exchange.deliver(rows, there, self.requests)
        with self.meter.part("expert"):
            values, labels = unpack(rows, x.dtype, 1 + k)
            x, weights, request, slots = values[:, :-k], values[:, -k:], labels[:, 0], labels[:, 1:]
            ranks = self.hosting.host[layer, slots]
            row, choice = (ranks == self.rank).nonzero(as_tuple=True)
            self.meter.computes(layer, len(row))
            answer = block.experts(block.norm2(x)[row], self.hosting.local[layer, slots[row, choice]])
            part = torch.zeros_like(x).index_add_(0, row, weights[row, choice, None] * answer)
        stays = ranks[:, 0] == self.rank
        if self.routing is not None:
            self.routing.moved(self.hosting.expert[layer, slots[stays]])
        if k > 1:
            part = self._follow(part, request, ranks, stays)
        return (x + part)[stays], request[stays]

    def _follow(self, part: Tensor, request: Tensor, ranks: Tensor, stays: Tensor) -> Tensor:
        """Send parts of visiting rows to the rank where their row stays; returns `part` with what came added."""
        with self.meter.part("gate"):
            visitors = (~stays).nonzero()[:, 0]
            visitors = visitors[ranks[visitors, 0].argsort(stable=True)]
            there = ranks[visitors, 0].bincount(minlength=self.ranks).tolist()
            coming = self._visits(ranks[stays]).sum(dim=0)  # the experts of a row tell where its parts come from
            coming[self.rank] = 0
            rows = pack(part[visitors], request[visitors, None])
        with self.meter.part("all_to_all_parts"):
            rows = self.exchange.all_to_all(rows, there, coming.tolist())
        with self.meter.part("expert"):
            values, labels = unpack(rows, part.dtype, 1)
            here = stays.nonzero()[:, 0]
            place = torch.zeros(int(request.max()) + 1 if len(request) else 0, dtype=torch.long, device=self.device)
            place[request[here]] = here
            return part.index_add(0, place[labels[:, 0]], values)

    def _prefill(self, prompts: list[Tensor], lengths: Tensor, mine: Tensor, most: int) -> Tensor:
        """Keys and values of all prompts, with two all-to-alls per layer at each request's home; returns the first new
        tokens. `most`: no rank has more tokens in its prompts."""
        here = torch.arange(int(lengths.max()), device=self.device) < lengths[mine, None]  # [n, positions]
        padded = pad_sequence(prompts, batch_first=True).to(self.device)[mine]
        row, position = here.nonzero(as_tuple=True)
        x, fresh = self.model.embed(padded, torch.arange(here.shape[1], device=self.device)), list[Fresh]()
        for layer, block in enumerate(self.blocks):
            q, k, v = block.attention.project(block.norm1(x))
            fresh.append((layer, mine[row], position, k[here], v[here]))
            self.cache.write(*fresh[-1])
            if len(mine):
                x = x + block.attention.mix(q, k, v)
            x = x.index_put((row, position), self._out_and_back(layer, x[here], most), accumulate=True)
        if self.mode == "coherent" and self.memory is None:
            self._gather_keys_values(fresh)
        dist.barrier()  # shared memory: all have written
        last = x[torch.arange(len(mine), device=self.device), lengths[mine] - 1]
        new = self.model.head(self.model.norm(last)).argmax(dim=-1)
        return self._everywhere(mine, new[:, None])[:, 0]

    def _everywhere(self, request: Tensor, tokens: Tensor) -> Tensor:
        """Tokens [n, columns] of `request` [n] on this rank to those of all, [requests, columns], on every rank."""
        rows = self.exchange.all_gather(torch.cat([request[:, None], tokens], dim=1).int()).long()
        return tokens.new_empty(len(rows), tokens.shape[1]).index_copy(0, rows[:, 0], rows[:, 1:])

    def _gather_keys_values(self, fresh: list[Fresh]) -> None:
        """Keys and values that arose on one rank, to all ranks' caches."""
        labels = [torch.stack([torch.full_like(r, layer), r, p], dim=1) for layer, r, p, _, _ in fresh]
        values = [torch.cat([k.flatten(1), v.flatten(1)], dim=1) for *_, k, v in fresh]
        rows = self.exchange.all_gather(pack(torch.cat(values), torch.cat(labels)))
        both, where = unpack(rows, values[0].dtype, 3)
        layer, request, position = where.unbind(dim=1)
        self.cache.write(layer, request, position, *both.unflatten(1, (2, *fresh[0][3].shape[1:])).unbind(dim=1))

    def _visits(self, ranks: Tensor) -> Tensor:
        """Bool [n, ranks]: which ranks hold one of the experts of a row, whose ranks are int64 [n, k]."""
        return F.one_hot(ranks, self.ranks).any(dim=1)

    def _count_routing(self, layer: int, experts: Tensor) -> None:
        if self.routing is not None:
            self.routing.add(layer, experts)

    def _counts(self, target: Tensor) -> Tensor:
        """int64 [ranks]: rows on their way to an expert of each rank."""
        counts = target.bincount(minlength=self.ranks)
        self.meter.moves(counts)
        return counts
