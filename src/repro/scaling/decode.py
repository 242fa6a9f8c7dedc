"""Time of one iteration of expert-parallel MoE decoding (ExFlow, arXiv 2401.08383). Each request gets one new token.

Modes:

    two_all_to_alls    as DeepSpeed-MoE: in every layer tokens travel to their experts and back; experts in rank order
    coherent           tokens stay where their expert is: one all-to-all a layer, and an all-gather of the new tokens
                       per iteration
    placed             coherent, with experts placed by affinity: another `Routing`, the same formula

Parts of an iteration:

    compute            of the busiest GPU. It reads the weights of attention, keys and values, and the visited experts
    all-to-all         only tokens that leave their GPU travel. Links inside a node and between nodes work at the same
                       time, so the slower of the two counts, after a message to every other GPU has begun
    all-gather         a ring, as NCCL's

Nothing overlaps, because a layer needs its tokens before it can begin. Nothing is padded.

DeepSpeed-MoE itself is two_all_to_alls with the `Routing` that `padded` gives. It gives every expert a buffer of one
length, in which empty places travel and are computed like tokens. What that length is, its options say: that of the
fullest expert of any GPU, so that no token is dropped (`full_buffers`), or, by default, an even share, beyond which
tokens are dropped (`dropping_buffers`). Its agreement on the longest buffer, an all-reduce of a number per layer, is not
counted.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from repro.models.gpt_moe import GPTMoEConfig
from repro.scaling import collectives, measured
from repro.scaling.machines import Machine, hardware
from repro.scaling.network import Value

Mode = Literal["two_all_to_alls", "coherent", "placed"]

# [INF] counts of kernels with fused attention. Attention: norm, QKV, cache write, attention, output, residual, norm.
# Router: gate product, softmax, top-k, count, sort, collect, return, weigh. Each expert, one after another as in
# DeepSpeed's `Experts`: up, activation, down.
ATTENTION_KERNELS, ROUTER_KERNELS, EXPERT_KERNELS, HEAD_KERNELS = 7, 8, 3, 3
VALUE_BYTES = 2  # of a weight, an activation, a key or a value
# Measured all-to-alls like those of decoding: bytes to each other GPU, and the most nodes.
_LIKE, _NODES = (2**12, 2**18), 16


def paper_model(experts: int, hidden: int = 1024) -> GPTMoEConfig:
    """The paper's GPT-MoE with so many experts. [INF] all other sizes: 24 MoE layers are likely, the hidden size was
    not found. These are those of the "350M" GPT, with 16 heads and Megatron's vocabulary."""
    return GPTMoEConfig(24, hidden, 16, vocab=50304, experts=experts, expert_hidden=4 * hidden)


@dataclass(frozen=True)
class Routing:
    """Where tokens go at a layer boundary. With top-k > 1 the copies of tokens count.

    crossing_fraction        share that leaves its GPU
    node_crossing_fraction   share that leaves its node; part of the first
    max_load                 tokens of the busiest GPU over the even share

    ValueError for shares outside 0 to 1 or in the wrong order, and for a load below 1.
    """

    crossing_fraction: float
    node_crossing_fraction: float = 0.0
    max_load: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.node_crossing_fraction <= self.crossing_fraction <= 1:
            raise ValueError(
                f"crossing_fraction is {self.crossing_fraction} and node_crossing_fraction "
                f"{self.node_crossing_fraction}, allowed: 0 to 1, and the second at most the first"
            )
        if not self.max_load >= 1:
            raise ValueError(f"max_load is {self.max_load}, must be at least 1")


def uniform(machine: Machine) -> Routing:
    """The routing where each GPU is equally likely to hold a token's expert, and loads are even."""
    gpus = machine.topology.world_size
    return Routing(1 - 1 / gpus, 1 - _gpus_per_node(machine) / gpus)


def padded(machine: Machine, padding: float) -> Routing:
    """The routing of two_all_to_alls with buffers of one length, `padding` times a GPU's tokens together (at least 1):
    every GPU sends as much to every other, and computes as much. Of GPUs: in an emulated network the processors would
    carry the padding too."""
    return replace(uniform(machine), max_load=padding)


def full_buffers(popularity: np.ndarray, gpus: int, tokens_per_gpu: int, draws: int = 100, seed: int = 0) -> float:
    """`padding` where no token is dropped: expected length of the fullest expert's buffer of any GPU, over the even
    share. Mean over layers; tokens are drawn one by one from `popularity`, float [layers, experts], each row sums to 1.
    """
    rng, experts = np.random.default_rng(seed), popularity.shape[1]
    fullest = [rng.multinomial(tokens_per_gpu, layer, (draws, gpus)).max(axis=(1, 2)).mean() for layer in popularity]
    return float(np.mean(fullest)) * experts / tokens_per_gpu


def dropping_buffers(experts: int, tokens_per_gpu: int) -> float:
    """`padding` with DeepSpeed's defaults (capacity factor 1, min_capacity 4), top-1: an even share, at least 4."""
    return max(math.ceil(tokens_per_gpu / experts), 4) * experts / tokens_per_gpu


@dataclass(frozen=True, eq=False)
class Iteration:
    """A predicted iteration; seconds are numbers or [draws].

    tokens         new ones, of all GPUs together
    all_to_all_s   of tokens to their experts, and back
    gather_s       all-gathers of new tokens, and of keys and values where those are sent
    """

    tokens: int
    compute_s: Value
    all_to_all_s: Value
    gather_s: Value

    @property
    def seconds(self) -> Value:
        return self.compute_s + self.routing_s

    @property
    def routing_s(self) -> Value:
        """Latency of all exchanges. The gathers count, as in the paper's Table I: coherence saves an all-to-all a layer
        because of them."""
        return self.all_to_all_s + self.gather_s

    @property
    def tokens_per_s(self) -> Value:
        return self.tokens / self.seconds

    @property
    def all_to_all_share(self) -> Value:
        """0 to 1."""
        return self.all_to_all_s / self.seconds

    def with_exchanges(self, factor: Value) -> "Iteration":
        """The same with all exchanges `factor` times as long."""
        return replace(self, all_to_all_s=factor * self.all_to_all_s, gather_s=factor * self.gather_s)


@cache
def exchange_errors() -> tuple[float, float]:
    """Standard deviations of log(predicted / measured) of an all-to-all: of what all sizes on a number of nodes share,
    and of the rest. Measured on Leonardo, whose nodes have 4 A100 and links as fast as Wilkes3's; of what predicts, its
    times had a part in `peer_s` alone."""
    table = measured.blink("leonardo")
    each = table.nbytes / (table.nodes * table.ranks_per_node)
    table = table[(table.collective == "all_to_all") & (table.nodes <= _NODES) & each.between(*_LIKE)]
    machines = [hardware("wilkes3").machine(nodes) for nodes in table.nodes]
    predicted = [all_to_all_seconds(n, m, uniform(m)) for n, m in zip(table.nbytes, machines, strict=True)]
    errors = np.log(np.array(predicted) / table.seconds)
    shared = errors.groupby(table.nodes).transform("mean")
    return float(np.sqrt((shared**2).mean())), float(np.sqrt(((errors - shared) ** 2).mean()))


def exchange_error(mode: str, draws: int, seed: int = 0) -> NDArray[np.float64]:
    """[draws] factors on the exchanges of a mode, for bands: the machine's parameters alone do not explain how far
    predictions are off. Modes are off together, but for what each has of its own. [INF] gathers are as far off."""
    streams = zip(("exchanges", mode), exchange_errors(), strict=True)
    together, alone = (np.random.default_rng([seed, *name.encode()]).normal(0, sd, draws) for name, sd in streams)
    return np.exp(together + alone)


def iteration(
    model: GPTMoEConfig,
    machine: Machine,
    tokens_per_gpu: int,
    context: int,
    mode: Mode,
    routing: Routing,
    *,
    kv_sent: bool = False,
) -> Iteration:
    """Predict an iteration in which every GPU has `tokens_per_gpu` requests with `context` tokens stored each.

    routing   of two_all_to_alls: from a token's home to its expert; else: from one layer's expert to the next one's
    kv_sent   keys and values of the new tokens go to all GPUs too (coherent modes only). The paper does not count them,
              and does not say how other GPUs would read them

    ValueError for what the machine cannot do, with what is allowed.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}, allowed: {', '.join(get_args(Mode))}")
    if kv_sent and mode == "two_all_to_alls":
        raise ValueError("kv_sent with two_all_to_alls: keys and values stay at home there, allowed: coherent, placed")
    _check(model, machine, tokens_per_gpu, context, routing)
    hand_in = tokens_per_gpu * model.hidden * VALUE_BYTES
    # A token goes to its expert. [INF] With top-k > 1 copies visit the other experts, and their results return to the
    # GPU of the expert with the largest weight.
    ways = 2 * [model.top_k] if mode == "two_all_to_alls" else [model.top_k, model.top_k - 1]
    routed = sum(all_to_all_seconds(copies * hand_in, machine, routing) for copies in ways if copies)
    # New tokens are gathered as hidden vectors: Table I counts them in the same unit as the all-to-all.
    gathers = [] if mode == "two_all_to_alls" else [hand_in]
    if kv_sent:
        gathers.append(tokens_per_gpu * 2 * model.layers * model.kv_width * VALUE_BYTES)
    return Iteration(
        tokens=machine.topology.world_size * tokens_per_gpu,
        compute_s=compute_seconds(model, machine, tokens_per_gpu, context, mode, routing.max_load),
        all_to_all_s=model.layers * routed,
        gather_s=sum((_gather(nbytes, machine) for nbytes in gathers), 0.0),
    )


def compute_seconds(
    model: GPTMoEConfig, machine: Machine, tokens_per_gpu: float, context: int, mode: Mode, max_load: float = 1.0
) -> Value:
    """Compute of the busiest GPU. In two_all_to_alls tokens attend at home, evenly; else attention follows the load of
    the experts. [INF] one GPU is the busiest in all."""
    attending = tokens_per_gpu * (1.0 if mode == "two_all_to_alls" else max_load)
    visits = tokens_per_gpu * model.top_k * max_load
    touched = touched_experts(model.experts / machine.topology.world_size, visits)
    attention_weights = 2 * model.hidden * (model.hidden + model.kv_width)  # Q, K, V and output
    expert_weights = 2 * model.hidden * model.expert_hidden  # up and down
    gate, head = model.hidden * model.experts, model.hidden * model.vocab

    def part(weights: float, products: float, kernels: float) -> Value:
        """The slower of reading `weights` and of `products` (two operations each), and the launches of `kernels`."""
        read = weights * VALUE_BYTES / machine.hbm_bytes_per_s
        return np.maximum(read, 2 * products / machine.flops_per_s) + kernels * machine.launch_s

    stored = attending * context * 2 * model.kv_width * VALUE_BYTES / machine.hbm_bytes_per_s
    attention = part(attention_weights, attending * attention_weights, ATTENTION_KERNELS) + stored
    router = part(gate, attending * gate, ROUTER_KERNELS)
    experts = part(touched * expert_weights, visits * expert_weights, touched * EXPERT_KERNELS)
    logits = part(head, attending * model.hidden * model.vocab, HEAD_KERNELS)
    return model.layers * attention + model.layers * (router + experts) + logits


def touched_experts(experts: float, tokens: float) -> float:
    """Expected number of a GPU's `experts` that some token visits, when each token visits one of them at random."""
    return experts * (1 - (1 - 1 / experts) ** tokens)


def all_to_all_seconds(nbytes: float, machine: Machine, routing: Routing) -> Value:
    """One direct all-to-all in which each GPU hands in `nbytes`, and the busiest `max_load` times as many. Where no
    token leaves, the call still has its latency and begins a message to every other GPU."""
    names, gpus = machine.topology.names, machine.topology.world_size
    if gpus == 1:
        return 0.0
    begun = (gpus - 2) * machine.network.peer_s  # once for both parts
    machine = replace(machine, network=replace(machine.network, peer_s=0.0))
    most = nbytes * routing.max_load
    inside = most * (routing.crossing_fraction - routing.node_crossing_fraction)
    between = most * routing.node_crossing_fraction
    inner, outer = _exchange(inside, machine, names[:-1]), _exchange(between, machine, names[-1:])
    # In an emulated network the processors of one machine carry both parts for all GPUs.
    host = machine.network.overhead_s + nbytes * routing.crossing_fraction * gpus / machine.network.host_bytes_per_s
    return begun + np.maximum(host, np.maximum(inner, outer))


def _exchange(sent: float, machine: Machine, levels: tuple[str, ...]) -> Value:
    """Direct all-to-all of the p ranks that differ in `levels`: each sends `sent` bytes away, and 1/p of all stays."""
    ranks = math.prod(level.size for level in machine.topology.levels if level.name in levels)
    if ranks == 1:
        return 0.0
    return collectives.seconds("all_to_all", sent * ranks / (ranks - 1), machine.network, "direct", levels=levels)


def _gather(nbytes: float, machine: Machine) -> Value:
    """All-gather of every GPU's `nbytes`: a ring of the library, or the direct exchange of `repro.comm`."""
    whole = nbytes * machine.topology.world_size
    return collectives.seconds(
        "all_gather", whole, machine.network, "ring" if machine.native else "direct", channels=machine.channels
    )


def _gpus_per_node(machine: Machine) -> int:
    """Ranks below the outermost level, which joins nodes."""
    return machine.topology.world_size // machine.topology.levels[-1].size


def _check(model: GPTMoEConfig, machine: Machine, tokens: int, context: int, routing: Routing) -> None:
    gpus, per_node = machine.topology.world_size, _gpus_per_node(machine)
    if tokens < 1 or context < 0:
        raise ValueError(f"tokens_per_gpu is {tokens} and context {context}, must be at least 1 and 0")
    if model.experts % gpus:
        raise ValueError(f"{model.experts} experts cannot be shared evenly by {gpus} GPUs")
    crossing, between = routing.crossing_fraction, routing.node_crossing_fraction
    if per_node == gpus and between > 0:
        raise ValueError(f"node_crossing_fraction is {between}: on one node only 0 is allowed")
    if per_node == 1 and crossing > between:
        raise ValueError(
            f"crossing_fraction is {crossing}: with one GPU a node only {between} is allowed (node_crossing_fraction)"
        )
