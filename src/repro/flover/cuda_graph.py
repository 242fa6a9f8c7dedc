"""A fused iteration on a GPU as one CUDA graph: launched at once, not kernel by kernel by a host that is slower."""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.models.decoder import Decoder
from repro.models.kv_cache import KVCache
from repro.models.rows import Rows, Span

MOST = 256  # rows: beyond, the GPU is busy for longer than the host takes to launch

Run = Callable[[], Tensor]


def recorder() -> Callable[[Run], Run]:
    """What records a function as a CUDA graph and returns its replay. All graphs of one recorder share their memory and
    output tensors: one runs at a time, and its result is read before the next."""
    pool = torch.cuda.graph_pool_handle()

    def record(run: Run) -> Run:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):  # kernels are compiled and chosen
                run()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


def size(rows: int) -> int:
    """1, 2, 4, 8, and multiples of 8: a graph serves no more than 7 rows too many, and few graphs serve all batches."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


class GraphedForward:
    """`model.forward` for rows that decode, from one graph per `size` of batch, recorded when it is first needed.

    Rows that fill up a batch repeat its first one, and store once more what that stores. `record`: takes a function
    without arguments and returns one that does the same again, on what then lies in the tensors it read.
    """

    def __init__(self, model: Decoder, cache: KVCache, record: Callable[[Run], Run] | None = None) -> None:
        self._model, self._cache, self._record = model, cache, record or recorder()
        self._passes: dict[int, tuple[Rows, Run]] = {}

    @torch.inference_mode()
    def prepare(self, most: int) -> None:
        """Record the graphs of all batches up to `most` rows, before anything is stored: they write to slot 0."""
        for filled in sorted({size(count) for count in range(1, min(most, MOST) + 1)}):
            self._pass(filled)

    @torch.inference_mode()
    def __call__(self, rows: Rows) -> Tensor:
        """Logits [n, vocab] of rows of n different slots, one token each; the next call may write over them."""
        count = len(rows.tokens)
        if count > MOST:
            return self._model.forward(rows, self._cache)
        held, replay = self._pass(size(count), rows)
        _fill(rows, held)
        return replay()[:count]

    def _pass(self, filled: int, rows: Rows | None = None) -> tuple[Rows, Run]:
        """The tensors that a graph of so many rows reads, and its replay. It is recorded, once, on what `rows` do."""
        if filled not in self._passes:
            tokens, slots, positions = torch.zeros(3, filled, dtype=torch.int64, device=self._model.device)
            # The span is for kernels that look at slots and positions only: the rows lie anywhere.
            held = Rows(tokens, slots, positions, (Span(slice(0, filled), 1, self._cache.capacity - 1),))
            if rows is not None:
                _fill(rows, held)
            with torch.cuda.device_of(held.tokens):
                self._passes[filled] = held, self._record(lambda: self._model.forward(held, self._cache))
        return self._passes[filled]


def _fill(rows: Rows, held: Rows) -> None:
    count = len(rows.tokens)
    for name in ("tokens", "slots", "positions"):
        given, into = getattr(rows, name), getattr(held, name)
        into[:count], into[count:] = given, given[:1]
