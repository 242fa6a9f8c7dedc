"""Time of one iteration of expert-parallel MoE decoding, one new token for every request, with two all-to-alls a layer or one
(ExFlow, arXiv 2401.08383).

    two_all_to_alls    DeepSpeed-MoE: tokens go out to their experts and home again, experts in rank order
    coherent           tokens stay where their expert is (one all-to-all a layer); an all-gather of the new tokens per iteration
    placed             coherent, with experts placed by affinity: another `Routing`, no other formula

    compute            of the busiest GPU. Decoding reads: weights of attention, keys and values, the experts that any token visits
    all-to-all         only the tokens that leave travel; inside a node and between nodes at the same time, so the slower part counts
    all-gather         a ring, as NCCL's

Nothing overlaps: a layer needs its tokens before it can begin. Nothing is padded: DeepSpeed's own exchange sends every expert's
buffer at the size of the fullest one, so this baseline is the harder one to beat.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

import numpy as np

from repro.exflow.evaluate import Cost
from repro.scaling import collectives
from repro.scaling.machines import Machine
from repro.scaling.moe import MoE
from repro.scaling.network import Value

Mode = Literal["two_all_to_alls", "coherent", "placed"]

# [INF] kernels with fused attention. Norm, QKV, cache write, attention, output, residual, norm; gate product, softmax, top-k, count,
# sort, collect, return, weigh; and for each expert, one after another as in DeepSpeed's `Experts`, up, activation, down.
ATTENTION_KERNELS, ROUTER_KERNELS, EXPERT_KERNELS, HEAD_KERNELS = 7, 8, 3, 3


@dataclass(frozen=True)
class Routing:
    """Of the tokens at a layer boundary, the shares that leave their GPU and their node (the second is part of the first), and the
    tokens of the busiest GPU over the even share. With top-k, of the copies of tokens."""

    crossing_fraction: float
    node_crossing_fraction: float = 0.0
    max_load: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.node_crossing_fraction <= self.crossing_fraction <= 1:
            raise ValueError(
                f"crossing_fraction is {self.crossing_fraction} and node_crossing_fraction {self.node_crossing_fraction}, "
                "allowed: 0 to 1, and the second at most the first"
            )
        if not self.max_load >= 1:
            raise ValueError(f"max_load is {self.max_load}, must be at least 1")

    @classmethod
    def of(cls, cost: Cost) -> "Routing":
        """Of a placement that was evaluated on a trace."""
        return cls(cost.crossing_fraction, cost.node_crossing_fraction, cost.max_load)


def uniform(machine: Machine) -> Routing:
    """Every GPU is as likely as any other to have a token's expert: what a token leaves its home by."""
    gpus, per_node = machine.topology.world_size, _gpus_per_node(machine)
    return Routing(1 - 1 / gpus, 1 - per_node / gpus)


@dataclass(frozen=True, eq=False)
class Iteration:
    """A predicted iteration of all GPUs; seconds are numbers or [draws]. `tokens`: new ones, of all GPUs; `all_to_all_s`: what the paper
    calls routing time."""

    tokens: int
    compute_s: Value
    all_to_all_s: Value
    gather_s: Value

    @property
    def seconds(self) -> Value:
        return self.compute_s + self.all_to_all_s + self.gather_s

    @property
    def tokens_per_s(self) -> Value:
        return self.tokens / self.seconds


def iteration(
    model: MoE,
    machine: Machine,
    tokens_per_gpu: int,
    context: int,
    mode: Mode,
    routing: Routing,
    *,
    kv_sent: bool = False,
) -> Iteration:
    """Predict an iteration in which every GPU has `tokens_per_gpu` requests with `context` tokens stored each.

    routing   two_all_to_alls: of tokens at home to their experts; else: from one layer's expert to the next one's
    kv_sent   coherent modes: keys and values of the new tokens go to all GPUs too. Without it they would have to be in memory
              that all GPUs see: the paper's accounting, which does not say how

    Raises ValueError for what the machine cannot do, naming what is allowed.
    """
    _check_mode(mode, kv_sent)
    _check(model, machine, tokens_per_gpu, context, routing)
    hand_in = tokens_per_gpu * model.hidden * model.value_bytes
    # A token goes to its expert. With top-k > 1 [INF] copies visit the others, and their parts return to the heaviest one's GPU.
    ways = 2 * [model.top_k] if mode == "two_all_to_alls" else [model.top_k, model.top_k - 1]
    routed = sum(all_to_all_seconds(copies * hand_in, machine, routing) for copies in ways if copies)
    # New tokens are gathered as hidden vectors: Table I counts them in the unit of the all-to-all.
    gathers = [] if mode == "two_all_to_alls" else [hand_in]
    if kv_sent:
        gathers.append(tokens_per_gpu * 2 * model.layers * model.kv_width * model.value_bytes)
    return Iteration(
        tokens=machine.topology.world_size * tokens_per_gpu,
        compute_s=compute_seconds(model, machine, tokens_per_gpu, context, mode, routing.max_load),
        all_to_all_s=model.moe_layers * routed,
        gather_s=sum((_gather(nbytes, machine) for nbytes in gathers), 0.0),
    )


def compute_seconds(
    model: MoE, machine: Machine, tokens_per_gpu: float, context: int, mode: Mode, max_load: float = 1.0
) -> Value:
    """Of the busiest GPU. [INF] it is the busiest in all that it does: at home attention is even, but a coherent token attends where its
    expert was, and so follows the load."""
    attending = tokens_per_gpu * (1.0 if mode == "two_all_to_alls" else max_load)
    visits = tokens_per_gpu * model.top_k * max_load
    touched = touched_experts(model.experts / machine.topology.world_size, visits)

    def part(weights: float, products: float, kernels: float) -> Value:
        """Bound by reading so many weights, or by multiplying (two operations each); kernels are launched one after another."""
        read = weights * model.value_bytes / machine.hbm_bytes_per_s
        return np.maximum(read, 2 * products / machine.flops_per_s) + kernels * machine.launch_s

    stored = attending * context * 2 * model.kv_width * model.value_bytes / machine.hbm_bytes_per_s
    attention = part(model.attention_weights, attending * model.attention_weights, ATTENTION_KERNELS) + stored
    gate = model.hidden * model.experts
    router = part(gate, attending * gate, ROUTER_KERNELS)
    experts = part(touched * model.expert_weights, visits * model.expert_weights, touched * EXPERT_KERNELS)
    mlp = part(model.expert_weights, attending * model.expert_weights, EXPERT_KERNELS)
    head = part(model.hidden * model.vocab, attending * model.hidden * model.vocab, HEAD_KERNELS)
    dense_layers = model.layers - model.moe_layers
    return model.layers * attention + model.moe_layers * (router + experts) + dense_layers * mlp + head


def touched_experts(experts: float, tokens: float) -> float:
    """Expected number of a GPU's `experts` that are visited at all, when each token visits any of them as likely as the others."""
    return experts * (1 - (1 - 1 / experts) ** tokens)


def all_to_all_seconds(nbytes: float, machine: Machine, routing: Routing) -> Value:
    """One exchange in which every GPU hands in `nbytes`, of which the routing's shares leave it and its node; the busiest GPU has
    `max_load` times as many.

    Direct: everybody to everybody at once, and a call even where nobody leaves. Where all GPUs are equally likely it is
    `collectives.seconds` of a direct all-to-all.
    """
    names, gpus = machine.topology.names, machine.topology.world_size
    if gpus == 1:
        return 0.0
    most = nbytes * routing.max_load
    inside = most * (routing.crossing_fraction - routing.node_crossing_fraction)
    between = most * routing.node_crossing_fraction
    parts = [_exchange(inside, machine, names[:-1]), _exchange(between, machine, names[-1:])]
    # Processors that carry the bytes of all GPUs (an emulated network only) carry both parts.
    parts.append(
        machine.network.overhead_s + nbytes * routing.crossing_fraction * gpus / machine.network.host_bytes_per_s
    )
    return reduce(np.maximum, parts)


def volume(
    mode: Mode, gpus: int, tokens_per_gpu: float, layers: int, crossing_fraction: float, kv_share: float = 0.0
) -> float:
    """Hidden vectors sent per iteration by the paper's Table I: 2 G N L p, or G N (L p* + G), where a GPU's own copy counts too.

    kv_share   width of keys over the hidden size, where keys and values are sent: 2 L kv_share (G - 1) more per token
    """
    _check_mode(mode, kv_share > 0)
    sent = gpus * tokens_per_gpu
    if mode == "two_all_to_alls":
        return 2 * sent * layers * crossing_fraction
    return sent * (layers * crossing_fraction + gpus + 2 * layers * kv_share * (gpus - 1))


def _exchange(sent: float, machine: Machine, levels: tuple[str, ...]) -> Value:
    """Direct among the ranks that differ in `levels`, each of which sends `sent` bytes away: a share of 1/p of a buffer stays."""
    ranks = np.prod([level.size for level in machine.topology.levels if level.name in levels], dtype=int)
    if ranks == 1:
        return 0.0
    return collectives.seconds("all_to_all", sent * ranks / (ranks - 1), machine.network, "direct", levels=levels)


def _gather(nbytes: float, machine: Machine) -> Value:
    """All-gather of every GPU's `nbytes`, by what the machine's library does (as `repro.scaling.step`)."""
    whole = nbytes * machine.topology.world_size
    algorithm = "ring" if machine.native else "direct"
    return collectives.seconds("all_gather", whole, machine.network, algorithm, channels=machine.channels)


def _gpus_per_node(machine: Machine) -> int:
    """The outermost level joins nodes; all below it is one."""
    return machine.topology.world_size // machine.topology.levels[-1].size


def _check_mode(mode: Mode, kv_sent: bool) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode is {mode!r}, allowed: {', '.join(get_args(Mode))}")
    if kv_sent and mode == "two_all_to_alls":
        raise ValueError("keys and values sent with two_all_to_alls: they stay at home, allowed: coherent, placed")


def _check(model: MoE, machine: Machine, tokens: int, context: int, routing: Routing) -> None:
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
