"""Time to serve requests with a dense decoder, from its sizes and the machine's rates: Flover's Fig. 4(a) (arXiv
2305.13484).

An iteration gives every running request one token:

    weights      read once for all requests, or multiplied with their tokens, whichever takes longer
    cache        keys and values of every request, read
    kernels      launched one after another: those of each layer, and those of each request, because the authors sample
                 and embed request by request
    all-reduces  two a layer among tensor-parallel GPUs, and an all-gather of the logits

`PredictedTimes` hands these times to the policies of `repro.flover.queueing`, which decide which requests run in an
iteration. Nothing here is fitted to the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from repro.flover.arrivals import RequestShape, fixed_arrivals
from repro.flover.queueing import Policy
from repro.scaling import collectives
from repro.scaling.machines import WILKES3, Hardware, Machine
from repro.scaling.network import Value

# [INF] counts of kernels. A pass: last norm, logits, their transposition, end of requests. A request, by the authors'
# code: embedding, and in `dynamic_decode` two penalties, top-k in two kernels, stop words, length.
PASS_KERNELS, REQUEST_KERNELS = 4, 7


@dataclass(frozen=True)
class Dense:
    """Sizes of a dense decoder in 16 bits.

    ffn_matrices   2, or 3 with a gate
    kernels        of a layer in a decoding iteration

    ValueError for sizes below 1 or heads that do not divide the hidden size.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    ffn_matrices: int = 3
    kernels: int = 10

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.ffn, self.vocab, self.ffn_matrices, self.kernels) < 1:
            raise ValueError(f"all sizes must be at least 1, found {self}")
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is not divisible by {self.heads} heads")

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrices."""
        return 4 * self.hidden**2 + self.ffn_matrices * self.hidden * self.ffn

    @property
    def weights(self) -> int:
        """Weights that a pass reads: those of all layers, and those of the logits."""
        return self.layers * self.layer_weights + self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * 2 * self.layers * self.hidden


# [INF] FasterTransformer's kernels: norm, QKV, attention with the cache write, output, up, bias and activation, down,
# residuals; a LLaMA layer has a second norm and a gate.
GPT_J_6B = Dense("gpt-j-6b", 28, 4096, 16, 16384, 50400, ffn_matrices=2, kernels=8)
LLAMA_13B = Dense("llama-13b", 40, 5120, 40, 13824, 32000)
LLAMA_33B = Dense("llama-33b", 60, 6656, 52, 17920, 32000)
LLAMA_65B = Dense("llama-65b", 80, 8192, 64, 22016, 32000)
# The authors' configuration file has another width than LLaMA's; [INF] whether the figure was made with it.
LLAMA_65B_RELEASED = replace(LLAMA_65B, name="llama-65b-released", ffn=11008)
PAPER_GPUS = {GPT_J_6B: 1, LLAMA_13B: 1, LLAMA_33B: 2, LLAMA_65B: 4, LLAMA_65B_RELEASED: 4}  # caption of Fig. 4


def machine_of(gpus: int, hardware: Hardware = WILKES3, draws: int = 0, seed: int = 0) -> Machine:
    """`gpus` of one node, by default of A100-80GB nodes. ValueError where a node has fewer.

    [INF] the paper names no GPU; its trace shows Ampere kernels. [INF] a GPU uses all of its links for the few others.
    """
    node, *outside = hardware.tiers
    if not 1 <= gpus <= node.size:
        raise ValueError(f"gpus is {gpus}, allowed: 1 to {node.size} ({node.name} of {hardware.name})")
    return replace(hardware, tiers=(replace(node, size=gpus), *outside)).machine(1, draws, seed)


@dataclass(frozen=True, eq=False)
class PredictedTimes:
    """`repro.flover.queueing.times.Times` of a model on a machine, or on draw number `draw` of an uncertain one.

    Layers are tensor-parallel over all ranks of the machine. ValueError where their sizes or the memory do not allow
    it.

    `decode` counts every request as long as the longest, because the queue tells no more: an upper bound. A prompt is a
    pass of its own; the authors' code skips it for LLaMA, which is one pass of 504.
    """

    model: Dense
    machine: Machine
    draw: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.draw < draws_of(self.machine):
            raise ValueError(f"draw is {self.draw}, allowed: 0 to {draws_of(self.machine) - 1}")

    def decode(self, batch: int, context: NDArray[np.int64]) -> NDArray[np.float64]:
        fixed = _pass_seconds(self.model, self.machine, batch, batch) + _request_seconds(self.machine, batch)
        seconds = self._one(fixed) + batch * context * self._one(_kv_seconds(self.model, self.machine))
        return np.asarray(seconds, np.float64)

    def prefill(self, tokens: int, start: int = 0) -> float:
        fixed = _pass_seconds(self.model, self.machine, tokens, 1) + _request_seconds(self.machine, 1)
        return self._one(fixed) + start * self._one(_kv_seconds(self.model, self.machine))

    @property
    def floor_s(self) -> float:
        """A pass of one token, without the kernels of its request."""
        return self._one(_pass_seconds(self.model, self.machine, 1, 1))

    def _one(self, value: Value) -> float:
        return float(value[self.draw]) if isinstance(value, np.ndarray) else float(value)


def total_seconds(
    model: Dense,
    machine: Machine,
    policy: Policy,
    requests: int = 32,
    interval_s: float = 0.5,
    prompt_tokens: int = 8,
    new_tokens: int = 504,
) -> Value:
    """Seconds until the last request is done (Fig. 4a): a number, or [draws] of the machine.

    The defaults are the paper's: 512 tokens a request, of which 8 are the prompt, and one request every 500 ms ([INF],
    which its totals show). ValueError for less than one request or token.
    """
    shapes = [
        RequestShape(arrival, prompt_tokens, new_tokens) for arrival in fixed_arrivals(requests, interval_s).tolist()
    ]
    times = [PredictedTimes(model, machine, draw) for draw in range(draws_of(machine))]
    totals = [policy.run(shapes, each).total_seconds for each in times]
    return np.array(totals) if _drawn(machine) else totals[0]


def draws_of(machine: Machine) -> int:
    """How many draws the machine's parameters have; 1 for numbers. ValueError where they disagree."""
    found = {len(value) for value in _drawn(machine)}
    if len(found) > 1:
        raise ValueError(f"parameters of the machine in {sorted(found)} draws, allowed: one number of draws")
    return found.pop() if found else 1


def _drawn(machine: Machine) -> list[NDArray[np.float64]]:
    """Those of the parameters used here that are arrays."""
    network = machine.network
    protocols = [protocol for links in network.links for protocol in links.protocols]
    values: Sequence[Value] = (
        *(machine.flops_per_s, machine.hbm_bytes_per_s, machine.launch_s),
        *(network.overhead_s, network.reduce_bytes_per_s, network.host_bytes_per_s),
        *(value for protocol in protocols for value in (protocol.latency_s, protocol.bytes_per_s)),
    )
    return [value for value in values if isinstance(value, np.ndarray)]


@lru_cache(maxsize=1024)
def _pass_seconds(model: Dense, machine: Machine, tokens: int, rows: int) -> Value:
    """A pass of `tokens` tokens through all layers, of which `rows` go on to logits.

    Without reading the cache, and without the kernels of each request. Cached, because all draws and iterations of a
    run ask for the same few.
    """
    gpus = machine.topology.world_size
    if model.heads % gpus or model.ffn % gpus:
        raise ValueError(f"{model.heads} heads and ffn {model.ffn} cannot be shared evenly by {gpus} GPUs")
    if 2 * model.weights / gpus > machine.memory_bytes:
        raise ValueError(
            f"{model.name}: {2 * model.weights / gpus:.3g} bytes of weights a GPU, "
            f"allowed: {machine.memory_bytes:.3g} (its memory)"
        )
    read = 2 * model.weights / gpus / machine.hbm_bytes_per_s
    multiplied = tokens * model.layers * model.layer_weights + rows * model.vocab * model.hidden
    products = 2 * multiplied / gpus / machine.flops_per_s
    launches = (model.layers * model.kernels + PASS_KERNELS) * machine.launch_s
    return np.maximum(read, products) + launches + _messages(model, machine, tokens, rows)


def _kv_seconds(model: Dense, machine: Machine) -> Value:
    """To read the keys and values of one token. Attention does two operations a byte, so memory decides."""
    return model.kv_bytes / machine.topology.world_size / machine.hbm_bytes_per_s


def _request_seconds(machine: Machine, requests: int) -> Value:
    return requests * REQUEST_KERNELS * machine.launch_s


def _messages(model: Dense, machine: Machine, tokens: int, rows: int) -> Value:
    """All-reduces of hidden states after attention and MLP of every layer, and an all-gather of the logits."""
    levels = machine.topology.levels
    used = [number for number, level in enumerate(levels) if level.size > 1]
    if not used:
        return 0.0
    names = machine.topology.names[used[0] : used[-1] + 1]
    hidden = 2 * tokens * model.hidden
    ring, tree = (
        collectives.seconds("all_reduce", hidden, machine.network, algorithm, levels=names, channels=machine.channels)
        for algorithm in ("ring", "tree")
    )
    logits = collectives.seconds("all_gather", 2 * rows * model.vocab, machine.network, "ring", levels=names)
    return 2 * model.layers * np.minimum(ring, tree) + logits  # NCCL's two, by the size
