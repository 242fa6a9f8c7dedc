"""Routing traces: which expert each token visits in each layer, and how often one expert follows another.

Beside what the published solver reads, [tokens, layers], a trace has the k experts of top-k routing and the sequence
boundaries, so that a placement can be judged on sequences that it never saw.
"""

import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from numpy.typing import DTypeLike

from repro.exflow.paper import count_transitions

MOST_EXPERTS = 4096  # the counts take E² numbers a layer; no model has a quarter of this
BLOCK = 65_536  # tokens counted at a time: memory stays flat however long a (memory-mapped) trace is


@dataclass(frozen=True)
class Trace:
    """`experts`: integer [tokens, layers] or [tokens, layers, k], the most weighted expert first; ids 0..num_experts-1.

    `sequences`: int [tokens], the sequence each token belongs to (None: unknown). `source` names the trace in messages.
    `weights`: float, shaped like `experts`, how strongly the router chose each (None: unknown).
    ValueError names `source` and what is wrong: a float dtype, another rank, the first row with an id out of range.
    """

    experts: np.ndarray
    num_experts: int
    sequences: np.ndarray | None = None
    source: str = "trace"
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        _check_shape(self.experts, self.source)
        if self.num_experts < 1:
            raise ValueError(f"{self.source}: num_experts is {self.num_experts}, must be at least 1")
        for start in range(0, self.tokens, BLOCK):
            block = self.experts[start : start + BLOCK]
            if len(bad := np.argwhere((block < 0) | (block >= self.num_experts))):
                (row, layer, *_), found, last = bad[0], block[tuple(bad[0])], self.num_experts - 1
                raise ValueError(f"{self.source}: row {start + row}, layer {layer}: expert {found} is not in 0..{last}")
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
        """(train, held-out): whole sequences drawn at random until `fraction` of the tokens is in train.

        Tokens of one sequence resemble each other, so a split by tokens would let the placement see what it is judged
        on. Raises ValueError without sequence ids, or when either part would be empty.
        """
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


def by_layer(experts: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
    """Integer [layers, tokens, k], contiguous, of `experts` as in a `Trace`."""
    experts = experts[:, :, None] if experts.ndim == 2 else experts
    return np.ascontiguousarray(experts.transpose(1, 0, 2), dtype)


def add_pairs(experts: np.ndarray, pairs: np.ndarray) -> None:
    """Count the k·k pairs of each token of `experts`, as in a `Trace`, in `pairs`, int64 [layers-1, E, E]."""
    layers = by_layer(experts)  # counts of one layer fit a core's cache
    with ThreadPoolExecutor() as threads:
        list(threads.map(count_transitions, layers[:-1], layers[1:], pairs))


def transitions(trace: Trace) -> np.ndarray:
    """float64 [layers-1, E, E]: tokens that go from expert a of layer l to expert b of layer l+1.

    With top-k routing each of the k·k pairs of a token weighs 1/k², so that a token always weighs 1 per pair of layers.
    """
    pairs = np.zeros((trace.layers - 1, trace.num_experts, trace.num_experts), np.int64)
    for start in range(0, trace.tokens, BLOCK):
        add_pairs(np.asarray(trace.experts[start : start + BLOCK]), pairs)
    return pairs / float(trace.k**2)


def load_trace(path: str | Path, num_experts: int | None = None, top_k: int | None = None) -> Trace:
    """Read a trace; ValueError names the file and what is wrong with it, FileNotFoundError when there is none.

    `.npy`      [tokens, layers] or [tokens, layers, k]; memory-mapped
    `.npz`      `experts` of such a shape; optional `seq_len` [sequences] (tokens of each), `num_experts`, and `weights`
    `.parquet`  one integer column per layer, in order; an optional column `sequence`

    `num_experts`: experts per layer; None takes the file's, else the highest id + 1 (too low if the last expert is
    never used). `top_k`: keep the first k experts of a top-k trace; None keeps all.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such trace")
    readers = {".npy": _read_numpy, ".npz": _read_numpy, ".parquet": _read_parquet}
    if not path.is_file():
        raise ValueError(f"{path}: not a file")
    if num_experts is not None and num_experts < 1:
        raise ValueError(f"{path}: num_experts is {num_experts}, must be at least 1")
    if path.suffix not in readers:
        raise ValueError(f"{path}: unknown kind of trace {path.suffix!r}, allowed: {', '.join(readers)}")
    found = readers[path.suffix](path)
    _check_shape(found["experts"], str(path))
    if num_experts is not None:
        found["num_experts"] = num_experts
    count = found.setdefault("num_experts", int(found["experts"].max()) + 1)
    if count > MOST_EXPERTS:
        raise ValueError(f"{path}: {count} experts per layer, allowed: at most {MOST_EXPERTS}")
    trace = Trace(source=str(path), **found)
    return trace if top_k is None else trace.top(top_k)


def _read_numpy(path: Path) -> dict[str, Any]:
    try:
        file = np.load(path, mmap_mode="r")
        if isinstance(file, np.ndarray) != (path.suffix == ".npy"):
            raise ValueError("a single array is .npy, an archive is .npz")
        if isinstance(file, np.ndarray):
            return {"experts": file}
        with file:
            found = {name: file[name] for name in ("experts", "seq_len", "num_experts", "weights") if name in file}
            names = file.files
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error, TypeError) as error:
        raise ValueError(f"{path}: not a NumPy {'array' if path.suffix == '.npy' else 'archive'}: {error}") from error
    if "experts" not in found:
        raise ValueError(f"{path}: no array `experts`, found: {', '.join(names)}")
    if (count := found.get("num_experts")) is not None:
        if count.shape != () or not np.issubdtype(count.dtype, np.integer):
            raise ValueError(f"{path}: num_experts is {count}, must be one integer")
        found["num_experts"] = int(count)
    if (lengths := found.pop("seq_len", None)) is not None:
        if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer) or (lengths < 0).any():
            raise ValueError(f"{path}: seq_len is {lengths.dtype} {lengths.shape}, must be counts, int [sequences]")
        if lengths.sum() != (tokens := len(found["experts"])):
            raise ValueError(f"{path}: seq_len sums to {lengths.sum()}, but `experts` has {tokens} tokens")
        found["sequences"] = np.repeat(np.arange(len(lengths)), lengths)
    return found


def _read_parquet(path: Path) -> dict[str, Any]:
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a Parquet file: {error}") from error
    columns = {name: table[name].to_numpy() for name in table.column_names}
    sequences = columns.pop("sequence", None)
    return {"experts": np.ascontiguousarray(np.array(list(columns.values())).T), "sequences": sequences}


def _check_shape(experts: np.ndarray, source: str) -> None:
    if not np.issubdtype(experts.dtype, np.integer):
        raise ValueError(f"{source}: dtype is {experts.dtype}, expert ids must be integers")
    if experts.ndim not in (2, 3):
        raise ValueError(f"{source}: shape is {experts.shape}, must be [tokens, layers] or [tokens, layers, k]")
    if experts.shape[0] < 1 or experts.shape[1] < 2 or 0 in experts.shape:
        raise ValueError(f"{source}: shape is {experts.shape}, need at least one token and two layers")
