"""Inter-layer expert affinity: how much the expert of this layer tells about the expert of the next.

The paper's definition is the conditional probability P(E_{p,j+1} | E_{i,j}) that a token routed to expert i at layer j
goes to expert p at layer j+1 (its Fig. 2 is a heat map of it). Mutual information puts one number on a whole matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from repro.exflow.trace import Trace, transitions


@dataclass(frozen=True)
class Affinity:
    """`mutual_information` of a trace, each float64 [layers-1]. `shuffled_..`: of a control with shuffled tokens, the
    mean of its draws. Its true value is 0; what it shows is the estimator's bias, about (E-1)²/(2·tokens·ln 2) bits."""

    bits: np.ndarray
    share: np.ndarray
    shuffled_bits: np.ndarray
    shuffled_share: np.ndarray


def conditional(counts: np.ndarray) -> np.ndarray:
    """P(E_{p,j+1} | E_{i,j}), float64 [layers-1, E, E], rows i, columns p, from transition counts of the same shape.
    Rows sum to 1; the row of an expert that no token visited is 0."""
    visits = counts.sum(axis=2, keepdims=True)
    return np.divide(counts, visits, out=np.zeros(counts.shape), where=visits > 0)


def mutual_information(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(bits, share), each float64 [layers-1], of transition counts [layers-1, E, E] (plug-in estimate). `share` is bits
    divided by the entropy of the next layer's expert (0 where that entropy is 0)."""
    joint = counts / counts.sum(axis=(1, 2), keepdims=True)
    before, after = joint.sum(axis=2), joint.sum(axis=1)
    bits = np.maximum(_entropy(before) + _entropy(after) - _entropy(joint.reshape(len(joint), -1)), 0.0)
    entropy = _entropy(after)
    return bits, np.divide(bits, entropy, out=np.zeros_like(bits), where=entropy > 0)


def without_each(trace: Trace, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`mutual_information` without the tokens of each unit in turn, for a jackknife: (bits, share), each float64
    [units, layers-1]. `units`: [tokens], what each token is left out with."""
    counts = transitions(trace)
    left = [mutual_information(counts - transitions(trace.take(units == unit))) for unit in np.unique(units)]
    bits, share = (np.array(each) for each in zip(*left, strict=True))
    return bits, share


def _entropy(probability: np.ndarray) -> np.ndarray:
    """Entropy in bits along the last axis."""
    logs = np.log2(probability, out=np.zeros_like(probability), where=probability > 0)
    return -(probability * logs).sum(axis=-1)


def shuffled(trace: Trace, seed: int | Sequence[int]) -> Trace:
    """The control: every layer's tokens permuted independently, so loads stay and every link between layers is gone."""
    rng = np.random.default_rng(seed)
    experts = np.array(trace.experts)
    for layer in range(trace.layers):
        experts[:, layer] = experts[rng.permutation(trace.tokens), layer]
    return Trace(experts, trace.num_experts, None, f"{trace.source} (shuffled)")


def measure_affinity(trace: Trace, seed: int = 0, shuffles: int = 1) -> Affinity:
    """Mutual information of neighbouring layers, and of the shuffled control: the mean of so many `shuffles`, drawn
    with `seed`. One draw is off by about 1 % where experts are many. ValueError for no shuffle."""
    if shuffles < 1:
        raise ValueError(f"shuffles is {shuffles}, must be at least 1")
    drawn = [mutual_information(transitions(shuffled(trace, [seed, draw]))) for draw in range(shuffles)]
    bits, share = np.mean(drawn, axis=0)
    return Affinity(*mutual_information(transitions(trace)), bits, share)
