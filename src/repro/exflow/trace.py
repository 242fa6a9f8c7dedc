"""Routing traces: which expert each token visits in each layer, and how often one expert follows another.

A trace has sequence boundaries, so that a placement can be judged on sequences that it never saw.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from repro.exflow.paper import count_transitions

MOST_EXPERTS = MOST_LAYERS = 4096  # no model has a quarter of these; the kernels count experts in int16
MOST_COUNTS = 2**27  # (layers-1)·E² transition counts: a gigabyte, of which the search takes several
BLOCK = 65_536  # tokens counted at a time: memory stays flat however long a (memory-mapped) trace is


@dataclass(frozen=True)
class Trace:
    """`experts`: integer [tokens, layers] or [tokens, layers, k], the most weighted expert first; ids 0..num_experts-1.

    `sequences`: int [tokens], the sequence each token belongs to (None: unknown). `source` names the trace in messages.
    `weights`: float, shaped like `experts`, how strongly the router chose each (None: unknown).
    ValueError names `source` and what is wrong: a float dtype, another number of dimensions, no token or fewer than two
    layers, the first row with an id out of range, more than MOST_EXPERTS experts or MOST_LAYERS layers, k above
    `num_experts`, or `sequences` or `weights` of another shape.
    """

    experts: np.ndarray
    num_experts: int
    sequences: np.ndarray | None = None
    source: str = "trace"
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        check_shape(self.experts.dtype, self.experts.shape, self.source)
        if not 1 <= self.num_experts <= MOST_EXPERTS:
            raise ValueError(f"{self.source}: num_experts is {self.num_experts}, allowed: 1 to {MOST_EXPERTS}")
        if self.k > self.num_experts:
            raise ValueError(f"{self.source}: top-{self.k} routing of {self.num_experts} experts")
        for start in range(0, self.tokens, BLOCK):
            self._checked(start)
        if self.sequences is not None and self.sequences.shape != (self.tokens,):
            raise ValueError(
                f"{self.source}: sequence ids {self.sequences.shape}, need one for each of {self.tokens} tokens"
            )
        if self.weights is not None and self.weights.shape != self.experts.shape:
            raise ValueError(f"{self.source}: weights {self.weights.shape} for experts {self.experts.shape}")

    @property
    def tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def layers(self) -> int:
        return self.experts.shape[1]

    @property
    def k(self) -> int:
        """Experts per token and layer."""
        return 1 if self.experts.ndim == 2 else self.experts.shape[2]

    def _checked(self, start: int) -> np.ndarray:
        """The BLOCK of `experts` from row `start` on; ValueError names the first row with an id out of range."""
        block = self.experts[start : start + BLOCK]
        if len(bad := np.argwhere((block < 0) | (block >= self.num_experts))):
            (row, layer, *_), found, last = bad[0], block[tuple(bad[0])], self.num_experts - 1
            raise ValueError(f"{self.source}: row {start + row}, layer {layer}: expert {found} is not in 0..{last}")
        return block

    def blocks(self) -> Iterator[np.ndarray]:
        """int16 [layers, up to BLOCK tokens, k], contiguous, one after another. Ids are checked again: the array may
        have been written to since, or the file that it maps, and the kernels check nothing."""
        return (by_layer(self._checked(start)) for start in range(0, self.tokens, BLOCK))

    def top(self, k: int) -> "Trace":
        """The same trace with the first `k` experts of each token and layer; ValueError when it has fewer."""
        if not 1 <= k <= self.k:
            raise ValueError(f"{self.source}: top-{k} asked of a top-{self.k} trace, allowed: 1 to {self.k}")
        first = ... if self.experts.ndim == 2 else (..., 0) if k == 1 else (..., slice(k))
        weights = None if self.weights is None else self.weights[first]
        return replace(self, experts=self.experts[first], weights=weights)

    def take(self, rows: np.ndarray) -> "Trace":
        """The tokens in `rows` (indices or a mask)."""
        sequences, weights = (None if each is None else each[rows] for each in (self.sequences, self.weights))
        return replace(self, experts=self.experts[rows], sequences=sequences, weights=weights)

    def sample(self, tokens: int, seed: int) -> "Trace":
        """`tokens` tokens drawn at random without replacement, in their old order; ValueError when there are fewer."""
        if not 1 <= tokens <= self.tokens:
            raise ValueError(f"{self.source}: {tokens} tokens asked, allowed: 1 to {self.tokens}")
        rows = np.random.default_rng(seed).choice(self.tokens, tokens, replace=False)
        return self.take(np.sort(rows))

    def split(self, fraction: float, seed: int) -> tuple["Trace", "Trace"]:
        """(train, held-out): whole sequences, whose tokens resemble each other, drawn at random until `fraction` of the
        tokens is in train. Raises ValueError without sequence ids, or when either part would be empty."""
        if self.sequences is None:
            raise ValueError(f"{self.source}: no sequence boundaries, so whole sequences cannot be held out")
        if not 0.0 < fraction < 1.0:
            raise ValueError(f"split fraction is {fraction}, must be between 0 and 1")
        ids, lengths = np.unique(self.sequences, return_counts=True)
        order = np.random.default_rng(seed).permutation(len(ids))
        before = np.cumsum(lengths[order]) - lengths[order]
        train = np.isin(self.sequences, ids[order[before < fraction * self.tokens]])
        if train.all():
            raise ValueError(f"{self.source}: {len(ids)} sequences are too few to hold any out")
        return self.take(train), self.take(~train)


def by_layer(experts: np.ndarray) -> np.ndarray:
    """int16 [layers, tokens, k], contiguous, of `experts` as in a `Trace`."""
    experts = experts[:, :, None] if experts.ndim == 2 else experts
    return np.ascontiguousarray(experts.transpose(1, 0, 2), np.int16)


def transitions(trace: Trace) -> np.ndarray:
    """float64 [layers-1, E, E]: tokens that go from expert a of layer l to expert b of layer l+1.

    With top-k routing each of the k·k pairs of a token weighs 1/k², so that a token always weighs 1 per pair of layers.
    ValueError when the result would have more than MOST_COUNTS numbers.
    """
    shape = (trace.layers - 1, trace.num_experts, trace.num_experts)
    if (numbers := math.prod(shape)) > MOST_COUNTS:
        machine = f"{trace.layers} layers of {trace.num_experts} experts"
        raise ValueError(f"{trace.source}: {machine} have {numbers:,} transition counts, allowed: {MOST_COUNTS:,}")
    pairs = np.zeros(shape, np.int64)
    with ThreadPoolExecutor() as threads:
        for layers in trace.blocks():  # counts of one layer fit a core's cache
            list(threads.map(count_transitions, layers[:-1], layers[1:], pairs))
    return pairs / float(trace.k**2)


def check_shape(dtype: np.dtype, shape: tuple[int, ...], source: str) -> None:
    """ValueError, which names `source`, unless an array of this dtype and shape can be the experts of a trace."""
    if dtype.kind not in "iu":
        raise ValueError(f"{source}: dtype is {dtype}, expert ids must be integers")
    if len(shape) not in (2, 3):
        raise ValueError(f"{source}: shape is {shape}, must be [tokens, layers] or [tokens, layers, k]")
    if shape[0] < 1 or shape[1] < 2 or 0 in shape:
        raise ValueError(f"{source}: shape is {shape}, need at least one token and two layers")
    if shape[1] > MOST_LAYERS:
        raise ValueError(f"{source}: shape is {shape}, which are {shape[1]} layers, allowed: at most {MOST_LAYERS}")
