"""Routing traces from processes that are fully known: for benchmarks and tests of the placement search.

  markov       the next expert depends on the present one alone, which is all that transition counts can say
  topic        a latent topic that the token keeps for a while chooses the experts: affinity reaches over many layers
  topic_top_k  the same with k different experts for each token and layer

Experts are equally popular (`markov` can skew them), so a placement gains nothing by load. Tokens are drawn one after
another from one stream: the first n tokens do not depend on how many follow, and what follows is held-out data of the
same process.
"""

import numpy as np
from numba import njit

from repro.exflow.trace import Trace

BALANCING_ROUNDS = 200  # of Sinkhorn's iteration
NEVER_ZERO = 1e-9  # added to the weight of a transition: Sinkhorn needs positive matrices
NEVER_ZERO_TOP_K = 1e-6


def markov(layers: int, experts: int, tokens: int, alpha: float = 0.3, skew: float = 0.0, seed: int = 0) -> Trace:
    """Top-1 trace [tokens, layers] of a Markov chain over experts.

    `alpha`: concentration of the Dirichlet distribution that the rows of each transition matrix come from, before they
    are balanced to the popularity of the experts: 0.2 is a strong affinity, 1 about that of Mixtral 8x7B. `skew`:
    popularity is exp(skew · normal). ValueError when a size or alpha is not positive.
    """
    _check(alpha=alpha, layers=layers - 1, experts=experts, tokens=tokens)
    rng = np.random.default_rng(seed)
    popularity = np.exp(skew * rng.standard_normal((layers, experts)))
    popularity /= popularity.sum(axis=1, keepdims=True)
    edges = np.empty((layers - 1, experts, experts))  # cumulative probabilities
    for layer in range(layers - 1):
        weights = rng.gamma(alpha, 1.0, (experts, experts)) + NEVER_ZERO
        edges[layer] = balanced(weights, popularity[layer], popularity[layer + 1]).cumsum(axis=1)
    visited = np.empty((tokens, layers), _smallest(experts))
    _walk(popularity[0].cumsum(), edges, visited, seed + 1)
    return Trace(visited, experts, source=f"markov({layers}, {experts}, alpha={alpha}, skew={skew}, seed={seed})")


def topic(
    layers: int,
    experts: int,
    tokens: int,
    topics: int | None = None,
    alpha: float = 0.1,
    stay: float = 0.95,
    seed: int = 0,
) -> Trace:
    """Top-1 trace [tokens, layers]: a token keeps its topic at each layer with probability `stay`, else draws one.

    Each of the `topics` (None: 2·E) prefers experts of each layer by weights ~ Dirichlet(`alpha`), balanced so that all
    experts are equally popular. ValueError when a size or alpha is not positive or `stay` is no probability.
    """
    topics = 2 * experts if topics is None else topics
    chances = _preferences(layers, experts, tokens, topics, alpha, stay, seed, NEVER_ZERO)
    visited = np.empty((tokens, layers), _smallest(experts))
    _topic_walk(chances.cumsum(axis=2), np.full(topics, 1.0 / topics).cumsum(), visited, stay, seed + 1)
    return Trace(
        visited, experts, source=f"topic({layers}, {experts}, {topics}, alpha={alpha}, stay={stay}, seed={seed})"
    )


def topic_top_k(
    layers: int,
    experts: int,
    tokens: int,
    k: int,
    topics: int | None = None,
    alpha: float = 0.1,
    stay: float = 0.95,
    seed: int = 0,
) -> Trace:
    """Top-k trace [tokens, layers, k]: as `topic` (`topics` None: E), with k experts drawn without replacement.

    They are the k largest of log-probability + Gumbel noise, in this order, as a router's perturbed logits would
    choose.
    """
    if not 1 <= k <= experts:
        raise ValueError(f"k is {k}, allowed: 1 to the {experts} experts")
    topics = experts if topics is None else topics
    chances = _preferences(layers, experts, tokens, topics, alpha, stay, seed, NEVER_ZERO_TOP_K)
    visited = np.empty((tokens, layers, k), _smallest(experts))
    _top_k_walk(np.log(chances), visited, stay, seed + 1)
    source = f"topic_top_k({layers}, {experts}, {k}, {topics}, alpha={alpha}, stay={stay}, seed={seed})"
    return Trace(visited, experts, source=source)


def balanced(weights: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Conditional probabilities [A, B]: `weights` scaled (Sinkhorn) so that `rows` [A] lead to `columns` [B].

    `rows` and `columns` are probabilities. Each row of the result sums to 1, columns are
    as close as the iteration came.
    """
    joint = weights.copy()
    for _ in range(BALANCING_ROUNDS):
        joint *= (rows / joint.sum(axis=1))[:, None]
        joint *= (columns / joint.sum(axis=0))[None, :]
    return joint / joint.sum(axis=1, keepdims=True)


def _preferences(
    layers: int, experts: int, tokens: int, topics: int, alpha: float, stay: float, seed: int, floor: float
) -> np.ndarray:
    """float64 [layers, topics, E]: how likely a topic leads to an expert."""
    _check(alpha=alpha, layers=layers - 1, experts=experts, tokens=tokens, topics=topics)
    if not 0.0 <= stay <= 1.0:
        raise ValueError(f"stay is {stay}, must be a probability")
    rng = np.random.default_rng(seed)
    even = np.full(topics, 1.0 / topics), np.full(experts, 1.0 / experts)
    return np.stack([balanced(rng.gamma(alpha, 1.0, (topics, experts)) + floor, *even) for _ in range(layers)])


def _check(alpha: float, layers: int, **sizes: int) -> None:
    if layers < 1 or not alpha > 0.0 or min(sizes.values()) < 1:
        found = ", ".join(f"{name} {value}" for name, value in {"layers": layers + 1, **sizes, "alpha": alpha}.items())
        raise ValueError(f"need at least 2 layers, and one of everything else, and a positive alpha; found {found}")


def _smallest(experts: int) -> np.dtype:
    return np.min_scalar_type(experts - 1)


# The compiled walks draw from numba's own generator: seeding it there leaves NumPy's global one alone.


@njit(cache=True)
def _draw(edges: np.ndarray) -> int:
    """Index drawn from cumulative probabilities, whose last may be a rounding error below 1."""
    return min(np.searchsorted(edges, np.random.random()), len(edges) - 1)


@njit(cache=True)
def _walk(first: np.ndarray, edges: np.ndarray, visited: np.ndarray, seed: int) -> None:
    np.random.seed(seed)
    for token in range(visited.shape[0]):
        expert = _draw(first)
        visited[token, 0] = expert
        for layer in range(edges.shape[0]):
            expert = _draw(edges[layer, expert])
            visited[token, layer + 1] = expert


@njit(cache=True)
def _topic_walk(edges: np.ndarray, topic_edges: np.ndarray, visited: np.ndarray, stay: float, seed: int) -> None:
    np.random.seed(seed)
    for token in range(visited.shape[0]):
        topic = _draw(topic_edges)
        for layer in range(visited.shape[1]):
            if np.random.random() > stay:
                topic = _draw(topic_edges)
            visited[token, layer] = _draw(edges[layer, topic])


@njit(cache=True)
def _top_k_walk(log_chances: np.ndarray, visited: np.ndarray, stay: float, seed: int) -> None:
    np.random.seed(seed)
    _, topics, experts = log_chances.shape
    tokens, layers, k = visited.shape
    score = np.empty(experts)
    for token in range(tokens):
        topic = np.random.randint(topics)
        for layer in range(layers):
            if np.random.random() > stay:
                topic = np.random.randint(topics)
            for expert in range(experts):
                score[expert] = log_chances[layer, topic, expert] - np.log(-np.log(np.random.random()))
            for choice in range(k):
                best = np.argmax(score)
                visited[token, layer, choice] = best
                score[best] = -np.inf
