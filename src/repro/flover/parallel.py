"""One engine over tensor-parallel ranks: rank 0 alone schedules and samples, and tells the others what each pass is.
So they cannot disagree. The authors' ranks each poll their own queue: two may fuse a request at different tokens."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from repro.models.decoder import Decoder
from repro.models.kv_cache import KVCache
from repro.models.rows import Rows

_CHANGES = ("move", "reserve", "free", "clear")  # what changes a cache besides a pass
Change = tuple[str, tuple[Any, ...]]  # method of the cache, or one of the model's that makes a new one; its arguments


class RankLost(RuntimeError):
    """A tensor-parallel rank died or does not answer; nothing can be decoded any more."""


@dataclass(frozen=True)
class _Pass:
    """`changes` since the pass before, in order, and what this one processes, on the CPU."""

    changes: list[Change]
    rows: Rows
    wanted: Tensor | slice

    def digest(self) -> bytes:
        """What each request feeds, and where."""
        rows = self.rows
        told = [part.tolist() for part in (rows.tokens, rows.slots, rows.positions)]
        return hashlib.sha256(repr(told).encode()).digest()


class _Mirrored:
    """Rank 0's cache; what changes it is noted for the others. Bytes are those of all ranks, whose parts are equal."""

    def __init__(self, cache: KVCache, ranks: int, changes: list[Change]) -> None:
        self.cache, self._ranks, self._changes = cache, ranks, changes

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.cache, name)
        if name not in _CHANGES:
            return found

        def change(*args: Any) -> int | None:
            self._changes.append((name, args))
            moved: int | None = found(*args)  # bytes, of `move` alone
            return None if moved is None else moved * self._ranks

        return change

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes * self._ranks


class Leader:
    """Rank 0's model, to be served by an `Engine` like any other. One cache at a time: a new one ends the one before.
    Leaving the `with` block lets the followers go. RankLost when one of them is gone, and in every pass after one that
    failed, since that has let them go. ValueError for a model that is not sharded, or of another rank, and for a pass
    over an earlier cache."""

    def __init__(self, model: Decoder) -> None:
        if model.shard is None or model.shard.rank:
            raise ValueError(f"a leader is rank 0 of a sharded model, found {_of(model)}")
        self.model, self._broken = model, False
        self._cache: _Mirrored | None = None
        self._changes: list[Change] = []  # that the followers do not know yet
        self.config, self.device, self.kernels = model.config, model.device, model.kernels
        self.digest = hashlib.sha256()  # of all passes: followers return theirs

    def new_cache(self, slots: int, capacity: int) -> _Mirrored:
        return self._make("new_cache", slots, capacity)

    def new_paged_cache(self, slots: int, capacity: int, blocks: int, block: int) -> _Mirrored:
        return self._make("new_paged_cache", slots, capacity, blocks, block)

    def forward(self, rows: Rows, cache: _Mirrored, wanted: Tensor | slice = slice(None)) -> Tensor:
        """As `Decoder.forward`, on all ranks."""
        if cache is not self._cache:
            raise ValueError("an earlier cache: the followers have it no more")
        if self._broken:
            raise RankLost("an earlier pass failed, and the other ranks were let go")
        told = _Pass(self._changes, rows.to("cpu"), wanted.cpu() if isinstance(wanted, Tensor) else wanted)
        self._broken = True  # until the pass is done: whoever fails in the middle leaves followers in an all-reduce
        with _losses():
            _told(told)
            self.digest.update(told.digest())
            self._changes.clear()
            logits = self.model.forward(rows, cache.cache, wanted)
        self._broken = False
        return logits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._broken:
            with suppress(Exception):  # again, in case that the pass did not end by itself
                dist.destroy_process_group()
            return
        with _losses():
            _told()

    def _make(self, maker: str, *sizes: int) -> _Mirrored:
        self._cache = None  # first: two may be more than fits
        cache = getattr(self.model, maker)(*sizes)
        self._changes = [(maker, sizes)]
        self._cache = _Mirrored(cache, dist.get_world_size(), self._changes)
        return self._cache


def follow(model: Decoder) -> str:
    """Do what the leader says until it is done; returns the sha256 of all passes. RankLost when a rank is gone; ValueError
    for a model that is not sharded, or of rank 0."""
    if model.shard is None or not model.shard.rank:
        raise ValueError(f"a follower is another rank than 0 of a sharded model, found {_of(model)}")
    digest, cache = hashlib.sha256(), None
    with _losses():
        while (told := _told()) is not None:
            digest.update(told.digest())
            for name, args in told.changes:
                if name in _CHANGES:
                    getattr(cache, name)(*args)
                else:
                    cache = None  # first: two may be more than fits
                    cache = getattr(model, name)(*args)
            assert cache is not None, "a pass before the first cache"
            wanted = told.wanted.to(model.device) if isinstance(told.wanted, Tensor) else told.wanted
            model.forward(told.rows.to(model.device), cache, wanted)
    return digest.hexdigest()


def _of(model: Decoder) -> str:
    return "one that is whole" if model.shard is None else f"one of rank {model.shard.rank}"


def _told(what: _Pass | None = None) -> Any:
    """What rank 0 says, on all ranks."""
    box = [what]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextmanager
def _losses() -> Iterator[None]:
    """torch.distributed raises plain RuntimeErrors when a connection breaks, and only on ranks at its ends. Whoever sees
    one, or fails by itself, leaves the group, which breaks its own connections: so all ranks hear of it at once."""
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            dist.destroy_process_group()
        if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "gloo" in str(error)):
            raise
        raise RankLost(f"a tensor-parallel rank is gone: {str(error).splitlines()[0]}") from error
