"""Proven lower bounds on the crossing fraction of any balanced placement: how far a placement can be from the best one.

For each pair of layers the pairs of experts on one GPU form a (E/P)-regular bipartite graph, and they come from two
balanced partitions. Each fact bounds the tokens that can be kept:

  b-matching    the heaviest (E/P)-regular bipartite graph, a linear program with integral vertices (`matching.py`)
  spectrum      sum/P plus E/P times the P-1 largest singular values of the doubly centred counts (Donath-Hoffman)
  semidefinite  both facts at once, that both sides of a layer see the same partition, that sharing a GPU is transitive,
                and the limit on load where there is one (`sdp.py`); takes seconds

Where Viterbi over all partitions is affordable (`../search/chain.py`), the optimum itself is the bound. A bound holds
for the counts it was computed from (the training tokens): on other tokens the best placement may cross less.

With copies of experts only the semidefinite bound is left, with weaker facts: it lets a token use one copy of an expert
on its way in and another on its way out.
"""

import math
import time

import numpy as np
from threadpoolctl import threadpool_limits

from repro.exflow.bound import sdp
from repro.exflow.bound.matching import b_matching, b_matching_within, dual_value
from repro.exflow.bound.spectra import EPSILON
from repro.exflow.evaluate import check_counts, distances, loads, total_cost
from repro.exflow.levels import Levels
from repro.exflow.search import balance, chain
from repro.exflow.search.portfolio import Clock, forever
from repro.exflow.search.problem import ROUNDING

__all__ = [
    "b_matching",
    "compile_kernels",
    "dual_value",
    "gap",
    "hop_cost_bound",
    "lower_bound",
    "lower_bound_within",
    "spectrum",
]

SPECTRUM_S = 1e-9  # seconds that a spectrum takes, over E³: it is not begun when fewer are left


def lower_bound(counts: np.ndarray, gpus: int, time_limit_s: float = 0.0, max_load: float | None = None) -> float:
    """Crossing fraction on `counts` [layers-1, E, E] that no placement of E/gpus experts per GPU and layer can beat.

    The best of all bounds above. `time_limit_s` is for the semidefinite one, which 0 leaves out; it stops earlier when
    it converged. The other bounds take milliseconds (58 layers of 256 experts: 2 s; a pair of layers of 512: half a
    minute) and are the same every time. `max_load`: of placements only whose busiest GPU gets at most so many times the
    even share of tokens in every layer; None: of all.

    Hops inside and between nodes count alike; see `hop_cost_bound`. ValueError when E is no multiple of gpus, the
    counts are not such counts, the time limit is negative, or no placement that keeps `max_load` is found.
    """
    return lower_bound_within(counts, gpus, time_limit_s, max_load=max_load)[0]


def lower_bound_within(
    counts: np.ndarray,
    gpus: int,
    time_limit_s: float = 0.0,
    clock: Clock = forever,
    max_load: float | None = None,
) -> tuple[float, float]:
    """(bound, share of the pairs of layers whose b-matching and spectrum are complete). `clock`: seconds that are left
    of a longer job; at 0 the work ends. Arguments and errors are those of `lower_bound`, and so is the bound where the
    share is 1. A pair that is not complete is bounded by what each expert keeps if it shares its GPU with the experts
    that it exchanges most tokens with. The semidefinite bound is tried only when all pairs are complete."""
    counts = check_counts(counts)
    experts = counts.shape[1]
    if gpus < 1 or experts % gpus:
        raise ValueError(f"{experts} experts per layer cannot be shared evenly by {gpus} GPUs")
    _check_time(time_limit_s)
    tokens, cap = loads(counts), None
    if max_load is not None:
        balance.check_limit(tokens, gpus, max_load)
        cap = max_load * tokens.sum(axis=1) / gpus * (1 + ROUNDING)
    if gpus == 1:
        return 0.0, 1.0
    # Matrices are small: where other processes compute too, more threads make this several times slower.
    with threadpool_limits(1, user_api="blas"):
        if gpus < experts and chain.count_partitions(experts, gpus) <= chain.EXACT_PARTITIONS:
            best = chain.exact_chain(counts, gpus, None if cap is None else _allowed(tokens, gpus, cap))
            return total_cost(counts, best, distances(gpus, gpus)) / counts.sum(), 1.0
        kept, share = _kept(counts, gpus, clock)
        if time_limit_s > 0 and gpus < experts and share == 1:  # with one expert per GPU the b-matching is the optimum
            compile_kernels()
            limits = None if cap is None else (tokens, cap)
            kept = min(kept, sdp.kept_bound(counts, gpus, _within(time_limit_s, clock), limits))
    return _crossing(counts, kept), share


def compile_kernels() -> None:
    """Compile what numba compiles, or load it from its cache: seconds the first time."""
    counts, looks = np.ones((1, 4, 4)), iter([1.0] * sdp.CHECK_EVERY)
    b_matching(counts[0], 2)
    sdp.kept_bound(counts, 2, lambda: next(looks, 0.0))


def hop_cost_bound(
    counts: np.ndarray, levels: Levels, time_limit_s: float = 0.0, max_load: float | None = None
) -> float:
    """Cost of hops per token and transition that no placement on the machine `levels` can beat: Σ over levels of what a
    hop costs there beyond a hop one level further in, times the `lower_bound` on hops between the units of that inner
    level. Each level gets its share of the time. `counts`: transition counts, [layers-1, E, E]; `levels`:
    `Placement.machine`, or of `levels.make_levels`. ValueError as `lower_bound`."""
    units = [levels.gpus // inner for inner in (1, *levels.spans[:-1])]
    dearer = np.diff(levels.costs, prepend=0.0)
    paid = [(more, number) for more, number in zip(dearer, units, strict=True) if more > 0 and number > 1]
    return sum(float(more) * lower_bound(counts, number, time_limit_s / len(paid), max_load) for more, number in paid)


def replicated_bound(
    counts: np.ndarray, gpus: int, held: int, time_limit_s: float = 30.0, clock: Clock = forever
) -> float:
    """Crossing fraction on `counts` [layers-1, E, E] that no placement on `gpus` GPUs can beat, whatever copies of
    experts it has and however it shares tokens among them, when a GPU holds at most `held` different experts of a layer
    (E/gpus + extra slots). For hops between nodes, give their number and what one holds. The limits are those of
    `lower_bound_within`. ValueError when the GPUs cannot hold all experts, the counts are not such counts, or the time
    limit is negative."""
    counts = check_counts(counts)
    experts = counts.shape[1]
    if gpus < 1 or not experts <= gpus * held:
        raise ValueError(f"{gpus} GPUs with {held} experts of a layer each cannot hold all {experts}")
    if gpus * held == experts:
        return lower_bound_within(counts, gpus, time_limit_s, clock)[0]
    _check_time(time_limit_s)
    if held >= experts or time_limit_s == 0:
        return 0.0
    compile_kernels()
    with threadpool_limits(1, user_api="blas"):
        kept = sdp.kept_bound_of_copies(counts, gpus, held, _within(time_limit_s, clock))
    return _crossing(counts, kept)


def _crossing(counts: np.ndarray, kept: float) -> float:
    """The crossing fraction that is left when at most `kept` tokens are kept. Where all counts are whole, so are the
    tokens that cross: a bound less than a token below a placement proves that it is optimal."""
    total = float(counts.sum())
    least = max(0.0, total - kept)
    return (math.ceil(least) if (counts == np.round(counts)).all() else least) / total


def _within(seconds: float, clock: Clock) -> Clock:
    """The seconds that are left of these `seconds` from now on, and of `clock`."""
    end = time.perf_counter() + seconds
    return lambda: min(end - time.perf_counter(), clock())


def _check_time(time_limit_s: float) -> None:
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s is {time_limit_s}, must be 0 or more")


def _allowed(tokens: np.ndarray, gpus: int, cap: np.ndarray) -> np.ndarray:
    """bool [partitions, layers]: whether a partition keeps `cap` [layers] in a layer of `tokens` [layers, E]."""
    states = chain.partitions(tokens.shape[1], gpus)
    most = [[np.bincount(row, own, gpus).max() for own in tokens] for row in states]
    return np.array(most) <= cap


def _kept(counts: np.ndarray, gpus: int, clock: Clock) -> tuple[float, float]:
    """(upper bound on the tokens kept, share of complete pairs). All spectra come first: they are sooner done."""
    degree, kept, complete = counts.shape[1] // gpus, 0.0, 0
    spectra = [spectrum(pairs, gpus) if SPECTRUM_S * counts.shape[1] ** 3 < clock() else math.inf for pairs in counts]
    for pairs, spectral in zip(counts, spectra, strict=True):
        matched, done = b_matching_within(pairs, degree, clock)
        kept += min(matched, spectral)
        complete += done and spectral < math.inf
    return kept, complete / len(counts)


def gap(crossing_fraction: float, bound: float) -> float:
    """(crossing - bound) / crossing: no placement can avoid more than this share of the crossings; 0 is optimal."""
    return (crossing_fraction - bound) / crossing_fraction if crossing_fraction > 0 else 0.0


def spectrum(pairs: np.ndarray, gpus: int) -> float:
    """Upper bound on tokens kept between two balanced partitions of the experts of `pairs` [E, E] into `gpus`; rounded
    up as in `sdp.dual_bound`."""
    centred = pairs - pairs.mean(axis=0, keepdims=True)
    centred -= centred.mean(axis=1, keepdims=True)
    singular = np.linalg.svd(centred, compute_uv=False)
    kept = pairs.sum() / gpus + len(pairs) // gpus * singular[: gpus - 1].sum()
    return float(kept + EPSILON * 16 * pairs.size * pairs.sum())
