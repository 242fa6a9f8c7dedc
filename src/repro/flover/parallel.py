"""One engine over tensor-parallel ranks: rank 0 alone schedules and samples, and tells the others what each pass is.

    shard = Shard.of()
    model = Llama(config, weights, shard=shard)
    if shard.rank == 0:
        with Leader(model) as leader:
            report = Engine(leader, scheduler, capacity).serve(requests)
    else:
        follow(model)

So ranks cannot disagree. The authors' ranks each poll their own queue: two may fuse a request at different tokens.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from repro.models.decoder import Decoder
from repro.models.kv_cache import PagedCache, SlotCache
from repro.models.parallel import Shard
from repro.models.rows import Rows, Span

_CHANGES = ("move", "reserve", "free")  # what changes a cache besides a pass


class RankLost(RuntimeError):
    """A tensor-parallel rank died or does not answer; nothing can be decoded any more."""


@dataclass(frozen=True)
class _NewCache:
    maker: str  # method of the model
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class _Pass:
    """`changes` of the cache since the pass before, in order, and what this one processes."""

    changes: list[tuple[str, tuple[Any, ...]]]
    rows: tuple[Tensor, Tensor, Tensor, tuple[Span, ...]]
    wanted: Tensor | slice

    def digest(self) -> bytes:
        """What each request feeds, and where."""
        return hashlib.sha256(repr([part.tolist() for part in self.rows[:3]]).encode()).digest()


class _Mirrored:
    """Rank 0's cache: what changes it is noted, so that the others change theirs alike before the next pass. Bytes are
    those of all ranks, whose parts are equal."""

    def __init__(self, cache: SlotCache | PagedCache, ranks: int) -> None:
        self.cache, self._ranks = cache, ranks
        self.changes: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.cache, name)
        if name not in _CHANGES:
            return found

        def change(*args: Any) -> int | None:
            self.changes.append((name, args))
            moved: int | None = found(*args)  # bytes, of `move` alone
            return None if moved is None else moved * self._ranks

        return change

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes * self._ranks


class Leader:
    """Rank 0's model, to be served by an `Engine` like any other. One cache at a time: a new one ends the one before.
    Leaving the `with` block lets the followers go. RankLost when one of them is gone."""

    def __init__(self, model: Decoder) -> None:
        assert model.shard is not None and model.shard.rank == 0, "a leader is rank 0 of a sharded model"
        self.model, self._shard, self._broken = model, model.shard, False
        self._cache: _Mirrored | None = None
        self.config, self.device, self.kernels = model.config, model.device, model.kernels
        self.digest = hashlib.sha256()  # of all passes: followers return theirs

    def new_cache(self, slots: int, capacity: int) -> _Mirrored:
        return self._make("new_cache", slots, capacity)

    def new_paged_cache(self, slots: int, capacity: int, blocks: int, block: int) -> _Mirrored:
        return self._make("new_paged_cache", slots, capacity, blocks, block)

    def forward(self, rows: Rows, cache: _Mirrored, wanted: Tensor | slice = slice(None)) -> Tensor:
        """As `Decoder.forward`, on all ranks."""
        assert cache is self._cache, "an earlier cache: the followers have it no more"
        where = wanted.cpu() if isinstance(wanted, Tensor) else wanted
        told = _Pass(cache.changes, (rows.tokens.cpu(), rows.slots.cpu(), rows.positions.cpu(), rows.spans), where)
        self._broken = True  # until the pass is done: whoever fails in the middle leaves followers in an all-reduce
        with _losses(self._shard):
            _tell(told, self._shard)
            self.digest.update(told.digest())
            cache.changes = []
            logits = self.model.forward(rows, cache.cache, wanted)
        self._broken = False
        return logits

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RankLost):
            return
        if self._broken:
            with suppress(Exception):  # tells the followers: their connections break
                dist.destroy_process_group(self._shard.group)
            return
        with _losses(self._shard):
            _tell(None, self._shard)

    def _make(self, maker: str, *sizes: int) -> _Mirrored:
        with _losses(self._shard):
            _tell(_NewCache(maker, sizes), self._shard)
        self._cache = _Mirrored(getattr(self.model, maker)(*sizes), self._shard.size)
        return self._cache


def follow(model: Decoder) -> str:
    """Do what the leader says until it is done; returns the sha256 of all passes. RankLost when a rank is gone."""
    shard = model.shard
    assert shard is not None and shard.rank > 0, "a follower is another rank than 0 of a sharded model"
    digest, cache = hashlib.sha256(), None
    with _losses(shard):
        while (told := _hear(shard)) is not None:
            if isinstance(told, _NewCache):
                cache = getattr(model, told.maker)(*told.sizes)
                continue
            assert cache is not None, "a pass before the first cache"
            digest.update(told.digest())
            for name, args in told.changes:
                getattr(cache, name)(*args)
            tokens, slots, positions = (part.to(model.device) for part in told.rows[:3])
            wanted = told.wanted.to(model.device) if isinstance(told.wanted, Tensor) else told.wanted
            model.forward(Rows(tokens, slots, positions, told.rows[3]), cache, wanted)
    return digest.hexdigest()


def _tell(what: _NewCache | _Pass | None, shard: Shard) -> None:
    dist.broadcast_object_list([what], group=shard.group, group_src=0, device=torch.device("cpu"))


def _hear(shard: Shard) -> _NewCache | _Pass | None:
    box = [None]
    dist.broadcast_object_list(box, group=shard.group, group_src=0, device=torch.device("cpu"))
    return box[0]


@contextmanager
def _losses(shard: Shard) -> Iterator[None]:
    """torch.distributed raises plain RuntimeErrors when a connection breaks, and only on ranks at its ends. Whoever
    sees one leaves the group, which breaks its own connections: so all ranks hear of it at once."""
    try:
        yield
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        with suppress(Exception):
            dist.destroy_process_group(shard.group)
        raise RankLost(f"a tensor-parallel rank is gone: {str(error).splitlines()[0]}") from error
