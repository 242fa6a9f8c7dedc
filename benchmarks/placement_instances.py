"""What `placement.py` places: real routing with sequences held out, and known processes with later tokens held out."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from placement_solvers import synthetic

from repro import exflow, paths


@dataclass(frozen=True)
class Instance:
    """`draw` returns (tokens to place by, held-out tokens)."""

    name: str
    draw: Callable[[], tuple[exflow.Trace, exflow.Trace]]
    gpus: int
    nodes: int = 1
    quick: bool = False

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes


def gptoss(top_k: int) -> tuple[exflow.Trace, exflow.Trace]:
    return exflow.load_trace(paths.data("gptoss20b_routing.npz"), 32, top_k).split(0.7, seed=0)


def drawn(process: Callable[..., exflow.Trace], layers: int, experts: int, tokens: int, **arguments) -> Callable:
    """Instance.draw of a synthetic process: `tokens` to place by, and half as many more of the same process."""

    def draw() -> tuple[exflow.Trace, exflow.Trace]:
        trace = process(layers, experts, tokens + tokens // 2, seed=1, **arguments)
        return trace.take(np.arange(tokens)), trace.take(np.arange(tokens, trace.tokens))

    return draw


def instances() -> list[Instance]:
    """All of them, the real trace first; shapes of known models are named after them."""
    markov, topic, top_k = synthetic.markov, synthetic.topic, synthetic.topic_top_k
    found = [Instance(f"gptoss-L24-E32-G{g}", lambda: gptoss(1), g, quick=g == 8) for g in (4, 8, 16)]
    found += [
        Instance("gptoss-top4-L24-E32-G8", lambda: gptoss(4), 8),
        Instance("gptoss-L24-E32-2x4", lambda: gptoss(1), 8, nodes=2),
    ]
    for layers, experts, tokens, alpha, machines in (
        (32, 8, 50_000, 1.0, (4, 8)),  # the shape of Mixtral 8x7B
        (24, 16, 50_000, 1.0, (4, 8, 16)),
        (24, 32, 50_000, 0.2, (4, 8, 16)),
        (24, 32, 50_000, 1.0, (8,)),
        (12, 64, 100_000, 0.2, (4, 8, 16)),
    ):
        draw = drawn(markov, layers, experts, tokens, alpha=alpha)
        for g in machines:
            quick = (experts, g) in ((8, 4), (16, 4))
            found.append(Instance(f"markov{alpha:g}-L{layers}-E{experts}-G{g}", draw, g, quick=quick))
    mixtral = drawn(top_k, 32, 8, 50_000, k=2, topics=16, alpha=0.15)
    return [
        *found,
        Instance("topic-L40-E64-G16", drawn(topic, 40, 64, 100_000), 16),
        Instance("mixtral-top2-L32-E8-G4", mixtral, 4),
        Instance("markov0.2-L24-E32-2x4", drawn(markov, 24, 32, 50_000, alpha=0.2), 8, nodes=2, quick=True),
        Instance("topic-L40-E64-4x4", drawn(topic, 40, 64, 100_000), 16, nodes=4),
        Instance("qwen3-235b-top8-L48-E128-2x8", drawn(top_k, 48, 128, 20_000, k=8, alpha=0.05), 16, nodes=2),
        Instance("deepseek-v3-top8-L58-E256-8x8", drawn(top_k, 58, 256, 20_000, k=8, alpha=0.05), 64, nodes=8),
        Instance("markov0.2-L61-E256-8x8", drawn(markov, 61, 256, 200_000, alpha=0.2), 64, nodes=8),
    ]
