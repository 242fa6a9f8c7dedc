"""Time to serve requests with a dense decoder, from its sizes and the machine's rates: Flover's Fig. 4(a) (arXiv
2305.13484).

An iteration gives every running request one token:

    weights      read once for all requests, or multiplied with their tokens, whichever takes longer
    cache        keys and values of every request, read
    kernels      launched one after another: those of each layer, and those of each request, because the authors sample
                 and embed request by request
    all-reduces  two a layer among tensor-parallel GPUs, and an all-gather of the logits

`PredictedTimes` hands these times to the policies of `repro.flover.queueing`. Nothing here is fitted to the paper.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from repro.flover import paper
from repro.flover.arrivals import RequestShape, fixed_arrivals
from repro.flover.queueing import Policy
from repro.models.config import DecoderConfig
from repro.models.gpt_j_neox import GPT_J_6B
from repro.models.llama import LlamaConfig
from repro.scaling import collectives
from repro.scaling.machines import CATALOGUE, Hardware, Machine
from repro.scaling.network import Value

# [INF] counts of kernels. A pass: last norm, logits, their transposition, end of requests. A request, by the authors'
# code: embedding, and in `dynamic_decode` two penalties, top-k in two kernels, stop words, length.
PASS_KERNELS, REQUEST_KERNELS = 4, 7


@dataclass(frozen=True)
class Dense:
    """A decoder in 16 bits, and the `kernels` of a layer in a decoding iteration. ValueError for sizes below 1."""

    config: DecoderConfig
    kernels: int

    def __post_init__(self) -> None:
        c = self.config
        if min(c.layers, c.width, c.heads, c.kv_heads, c.ffn, c.vocab, self.kernels) < 1:
            raise ValueError(f"all sizes must be at least 1, found {self}")

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        shapes = self.config.weight_shapes().items()
        return sum(math.prod(shape) for name, shape in shapes if name.startswith("blk.0.") and len(shape) == 2)

    @property
    def logit_weights(self) -> int:
        return self.config.vocab * self.config.width

    @property
    def weights(self) -> int:
        """Weights that a pass reads: those of all layers, and those of the logits."""
        return self.config.layers * self.layer_weights + self.logit_weights

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * 2 * self.config.layers * self.config.kv_heads * self.config.head_dim


def _llama(layers: int, width: int, heads: int, ffn: int) -> Dense:
    return Dense(LlamaConfig(layers=layers, width=width, heads=heads, kv_heads=heads, ffn=ffn, vocab=32000), kernels=10)


# By name: model, and GPUs. [INF] FasterTransformer's kernels: norm, QKV, attention with the
# cache write, output, up, bias and activation, down, residuals; a LLaMA layer has a second norm and a gate.
PAPER: dict[str, tuple[Dense, int]] = {
    "gpt-j-6b": (Dense(GPT_J_6B, kernels=8), paper.MODELS["gpt-j-6b"].gpus),
    "llama-13b": (_llama(40, 5120, 40, 13824), paper.MODELS["llama-13b"].gpus),
    "llama-33b": (_llama(60, 6656, 52, 17920), paper.MODELS["llama-33b"].gpus),
    "llama-65b": (_llama(80, 8192, 64, 22016), paper.MODELS["llama-65b"].gpus),
    # [CODE] as the authors' configuration file has it: half of LLaMA's MLP. [INF] that this is what they ran: a request
    # alone takes 10.8 s there, and 13.6 s with 33B on two GPUs, which hold as many bytes each as 65B on four would.
    "llama-65b-released": (_llama(80, 8192, 64, 11008), paper.MODELS["llama-65b"].gpus),
}


def machine_of(gpus: int, kind: Hardware = CATALOGUE["wilkes3"], draws: int = 0, seed: int = 0) -> Machine:
    """`gpus` of one node, by default of A100-80GB nodes. ValueError where a node has fewer.

    [INF] the paper names no GPU; its trace shows Ampere kernels. [INF] a GPU uses all of its links for the few others.
    """
    node, *outside = kind.tiers
    if not 1 <= gpus <= node.size:
        raise ValueError(f"gpus is {gpus}, allowed: 1 to {node.size} ({node.name} of {kind.name})")
    return replace(kind, tiers=(replace(node, size=gpus), *outside)).machine(1, draws, seed)


@dataclass(frozen=True, eq=False)
class PredictedTimes:
    """`repro.flover.queueing.times.Times` of a model on a machine, or on draw number `draw` of an uncertain one.

    Layers are tensor-parallel over all ranks of the machine. ValueError where sizes or memory do not allow it. `decode`
    counts every request as long as the longest, an upper bound. A prompt is a pass of its own, which the authors' code
    leaves out for LLaMA: one of 504 passes. Where parts share a pass (`mixed`), weights are read once, or multiplied
    with the tokens of all: rows that decode beside a chunk that is bound by products are not free.
    """

    model: Dense
    machine: Machine
    draw: int = 0

    def __post_init__(self) -> None:
        draws = np.size(_pass_seconds(self.model, self.machine, 1, 1))
        if not 0 <= self.draw < draws:
            raise ValueError(f"draw is {self.draw}, allowed: 0 to {draws - 1}")

    def decode(self, batch: int, context: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds, float64 [k], of iterations over `batch` rows, for each of `context` [k], the most stored tokens."""
        return np.asarray(self._uncached(batch, batch) + batch * context * self._kv, np.float64)

    def prefill(self, tokens: int, start: int = 0) -> float:
        """Seconds of a pass over `tokens` of a prompt behind its first `start`."""
        return self._uncached(tokens, 1) + start * self._kv

    def mixed(self, batch: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        """One pass: a token for each of `batch` rows of up to `context` tokens, and `chunks` (tokens, start)."""
        tokens = batch + sum(tokens for tokens, _ in chunks)
        stored = batch * context + sum(start for _, start in chunks)
        return self._uncached(tokens, batch + len(chunks)) + stored * self._kv

    @property
    def floor_s(self) -> float:
        """A pass of one token, without the kernels of its request."""
        return self._one(_pass_seconds(self.model, self.machine, 1, 1))

    def _uncached(self, tokens: int, requests: int) -> float:
        """A pass of these `tokens` of so many requests, without reading the cache."""
        sampling = requests * REQUEST_KERNELS * self.machine.launch_s
        return self._one(_pass_seconds(self.model, self.machine, tokens, requests) + sampling)

    @property
    def _kv(self) -> float:
        """To read the keys and values of one token. Attention does two operations a byte, so memory decides."""
        return self._one(self.model.kv_bytes / self.machine.topology.world_size / self.machine.hbm_bytes_per_s)

    def _one(self, value: Value) -> float:
        return float(value[self.draw]) if isinstance(value, np.ndarray) else float(value)


def total_seconds(
    model: Dense,
    machine: Machine,
    policy: Policy,
    requests: int = paper.REQUESTS,
    interval_s: float = paper.INTERVAL_S,
    prompt_tokens: int = paper.PROMPT_TOKENS,
    new_tokens: int = paper.TOKENS - paper.PROMPT_TOKENS,
) -> Value:
    """Seconds until the last request is done (Fig. 4a): a number, or [draws] of the machine.

    The defaults are the paper's. ValueError for less than one request or token.
    """
    arrivals = fixed_arrivals(requests, interval_s).tolist()
    shapes = [RequestShape(arrival, prompt_tokens, new_tokens) for arrival in arrivals]
    drawn = np.shape(_pass_seconds(model, machine, 1, 1))
    times = [PredictedTimes(model, machine, draw) for draw in range(math.prod(drawn))]
    totals = [policy.run(shapes, each).total_seconds for each in times]
    return np.array(totals) if drawn else totals[0]


@lru_cache(maxsize=1024)
def _pass_seconds(model: Dense, machine: Machine, tokens: int, rows: int) -> Value:
    """A pass of `tokens` tokens through all layers, of which `rows` go on to logits, without cache and sampling."""
    gpus, config = machine.topology.world_size, model.config
    if config.heads % gpus or config.ffn % gpus:
        raise ValueError(f"{config.heads} heads and ffn {config.ffn} cannot be shared evenly by {gpus} GPUs")
    nbytes = 2 * model.weights / gpus
    if nbytes > machine.memory_bytes:
        raise ValueError(f"{nbytes:.3g} bytes of weights a GPU, allowed: {machine.memory_bytes:.3g} (its memory)")
    multiplied = tokens * config.layers * model.layer_weights + rows * model.logit_weights
    products = 2 * multiplied / gpus / machine.flops_per_s
    launches = (config.layers * model.kernels + PASS_KERNELS) * machine.launch_s
    return np.maximum(nbytes / machine.hbm_bytes_per_s, products) + launches + _messages(model, machine, tokens, rows)


def _messages(model: Dense, machine: Machine, tokens: int, rows: int) -> Value:
    """All-reduces of hidden states after attention and MLP of every layer, and an all-gather of the logits."""
    network = machine.network
    counts = [
        links.count for links, level in zip(network.links, network.topology.levels, strict=True) if level.size > 1
    ]
    if not counts:
        return 0.0
    # All levels, as a tree is a chain in each but the outermost; channels leave through links that are used.
    channels = machine.channels or max(counts)
    hidden, logits = 2 * tokens * model.config.width, 2 * rows * model.config.vocab
    ring, tree = (
        collectives.seconds("all_reduce", hidden, network, algorithm, channels=channels)
        for algorithm in ("ring", "tree")
    )
    gathered = collectives.seconds("all_gather", logits, network, "ring", channels=channels)
    return 2 * model.config.layers * np.minimum(ring, tree) + gathered
