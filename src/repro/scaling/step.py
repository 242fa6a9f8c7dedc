"""Time and memory of one training step of any ZeRO plan on any machine.

compute    matrix products at the rate that large ones reach, the rest of a layer at the memory's, a launch per kernel
memory     what only reads and writes: copies beside the messages, sums of gradients, the update
messages   those of the plan (`repro.zero.traffic`), hop by hop: bytes, latencies, quantising what is sent and restoring
           what arrives
overlap    a gather or reduction of one block runs while another block computes; what comes once per step, at its end,
           can hide behind the last backward and the next forward, and messages of one level beside those of another,
           as far as `Assumptions` say that the engine does so. On an emulated network, whose processors all ranks
           share, this package's engine is simulated instead (`schedule`)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from repro.models.gpt import GPT, GPTConfig
from repro.scaling import schedule
from repro.scaling.assumptions import Assumptions
from repro.scaling.hops import hop_seconds
from repro.scaling.machines import Machine
from repro.scaling.network import Value
from repro.zero import Plan, memory, traffic
from repro.zero.layout import Layout, layout
from repro.zero.traffic import Collective

KERNELS_PER_LAYER = 14  # of a forward with fused attention: norms, products, bias and activation, residuals
OURS = Assumptions()
# Of Adam per value: gradient 4, master and two moments read and written 24, weight 2 written, unscale 4.
UPDATE_BYTES = 34
# Per value and backward pass: weights copied out of a gather's buffer before forward and backward 2 x 4, the gradient
# copied into a buffer 4 and widened 6. Per value of the gradients that a rank keeps: two sums read, one written, in 32
# bits.
COPY_BYTES, SUM_BYTES = 18, 12


@dataclass(frozen=True, eq=False)
class Step:
    """A predicted step; seconds are numbers or [draws].

    seconds      `compute_s` + `exposed_s`
    compute_s    forwards, backwards, and what the memory streams: copies, sums of gradients, Adam's update
    exposed_s    what messages add to the compute
    hidden_s     time of messages that compute covers; on an emulated network also what other messages cover
    level_s      time of the messages by the outermost level that they cross, before overlap; on an emulated network,
                 whose processors all ranks share, that of the links alone
    quantize_s   time of quantising and restoring; part of `level_s`, except on an emulated network
    flops        of a rank, recomputation not counted
    rank_bytes   memory that a rank needs: states, working memory, activations (`repro.zero.memory`)
    fits         whether it has that much
    """

    seconds: Value
    compute_s: Value
    exposed_s: Value
    hidden_s: Value
    level_s: dict[str, Value]
    quantize_s: Value
    flops: float
    rank_bytes: float
    fits: bool

    @property
    def tflops_per_rank(self) -> Value:
        """Model FLOPs per second, in 10^12."""
        return self.flops / self.seconds / 1e12

    @property
    def critical(self) -> str:
        """What most of the step waits for: `compute`, or the level whose messages take longest."""
        if not self.level_s or np.mean(self.exposed_s) <= np.mean(self.compute_s):
            return "compute"
        return max(self.level_s, key=lambda name: float(np.mean(self.level_s[name])))


def predict_step(
    plan: Plan,
    config: GPTConfig,
    machine: Machine,
    micro_batch: int = 1,
    accumulation: int = 1,
    compute_s: Value | None = None,
    assumed: Assumptions = OURS,
    gradient_bytes: int = 2,
) -> Step:
    """Predict a step of `plan` for a GPT of 16-bit weights.

    micro_batch      sequences per rank and backward pass
    accumulation     backward passes per step
    compute_s        of all forwards and backwards, where it was measured
    assumed          of the engine; default: this package's. On an emulated network this package's engine is simulated,
                     and of `assumed` only what it says of messages counts
    gradient_bytes   of an accumulated gradient value, for `rank_bytes`: 4 for this package's engine with its default
                     `gradient_dtype`

    ValueError for fewer than one sequence or backward pass, when the levels of plan and machine differ, and for an
    emulated network in draws.
    """
    for name, found in (("micro_batch", micro_batch), ("accumulation", accumulation)):
        if found < 1:
            raise ValueError(f"{name} is {found}, allowed: 1 and more")
    planned, there = plan.topology.mesh_shape, machine.topology.mesh_shape
    if planned != there:
        raise ValueError(f"the plan is for levels of {planned}, the machine has {there}")
    shapes = layout_of(config)
    streamed = streaming_seconds(plan, shapes.parameters, machine, accumulation)
    passes = compute_seconds(config, machine, micro_batch, accumulation) if compute_s is None else compute_s
    compute, sent = passes + streamed, _messages(plan, shapes, machine, accumulation, assumed)
    if machine.network.emulated:
        update = update_seconds(plan, shapes.parameters, machine)
        work = (accumulation, compute - update, update)
        exposed = schedule.step_seconds(plan, shapes, machine, *work, assumed) - compute
        hidden = sent.busy + sum(sent.levels.values()) - exposed
    else:
        messages, first = beside(sent.levels, assumed), beside(sent.early, assumed)
        window = machine.overlap * passes
        # The end of a step hides behind its last backward (gradients leave) and the next forward (weights arrive),
        # together as long as the passes of one micro-batch.
        end = np.minimum(assumed.end_overlap * (messages - first), window / accumulation)
        hidden = np.minimum(first + end, window)
        exposed = messages - hidden
    rank_bytes = memory.needed(plan, shapes, activations(config, micro_batch), gradient_bytes)
    return Step(
        seconds=compute + exposed,
        compute_s=compute,
        exposed_s=exposed,
        hidden_s=hidden,
        level_s={name: value for name, value in sent.levels.items() if np.any(value)},
        quantize_s=sent.quantize,
        flops=model_flops(config, micro_batch * accumulation),
        rank_bytes=rank_bytes,
        fits=rank_bytes <= machine.memory_bytes,
    )


class _Sent(NamedTuple):
    """Seconds of the messages of a step.

    levels     by the outermost level that they cross
    early      of `levels`, those of the layers: what is not sent at the end of the step
    busy       latencies, and work of processors that all ranks share, on an emulated network; elsewhere in `levels`
    quantize   of quantising and restoring, in `levels` or `busy`
    """

    levels: dict[str, Value]
    early: dict[str, Value]
    busy: Value
    quantize: Value


def _messages(plan: Plan, shapes: Layout, machine: Machine, accumulation: int, assumed: Assumptions) -> _Sent:
    levels: dict[str, Value] = dict.fromkeys(plan.topology.names, 0.0)
    early = levels.copy()
    busy: Value = 0.0
    quantize: Value = 0.0
    moves, shared = plan.moves, machine.network.emulated
    sums = (moves.reduce_to_optimizer, moves.all_reduce_replicas) if plan.reduce_across == "step" else ()
    last = (*sums, moves.gather_updated)  # routes that are walked after the last backward
    for collective in traffic.collectives(plan, shapes, accumulation):
        times = _times(plan, collective, accumulation, assumed)
        for hop in traffic.hops(collective, plan.topology):
            cost = hop_seconds(hop, machine, assumed)
            working = times * (cost.latency + cost.moving + cost.quantize)
            seconds = times * cost.links + (0.0 if shared else working)
            busy += working if shared else 0.0
            quantize += times * cost.quantize
            levels[hop.levels[-1]] += seconds
            if not any(collective.route is route for route in last):
                early[hop.levels[-1]] += seconds
    return _Sent(levels, early, busy, quantize)


def beside(levels: Mapping[str, Value], assumed: Assumptions) -> Value:
    """Seconds of messages of several levels, whose links do not share anything: at most all, at least the longest."""
    seconds = list(levels.values())
    total, longest = sum(seconds), seconds[0]
    for each in seconds[1:]:
        longest = np.maximum(longest, each)
    return total - assumed.side_by_side * (total - longest)


def model_flops(config: GPTConfig, sequences: int) -> float:
    """FLOPs without recomputation: 72 B s l h^2 (1 + s / 6h + V / 12lh), after Narayanan et al. 2021."""
    h, layers, s = config.hidden, config.layers, config.seq_len
    return 72 * sequences * s * layers * h * h * (1 + s / (6 * h) + config.vocab / (12 * layers * h))


def compute_seconds(config: GPTConfig, machine: Machine, micro_batch: int, accumulation: int) -> Value:
    """Forwards and backwards of a step on one rank; checkpointing adds a second forward."""
    passes = 4 if config.checkpointing else 3  # in forwards; a backward is two
    products = model_flops(config, micro_batch) * passes / 3 / machine.flops_per_s
    # Of a layer: its weights, and 34 s b h bytes of activations that it writes and a later kernel reads.
    activations = 2 * 34 * config.seq_len * micro_batch * config.hidden * config.layers
    weights = 2 * config.parameters
    streamed = passes * (activations + weights) / machine.hbm_bytes_per_s
    launches = passes * config.layers * KERNELS_PER_LAYER * machine.launch_s
    return accumulation * (products + streamed + launches)


def streaming_seconds(plan: Plan, parameters: int, machine: Machine, accumulation: int) -> Value:
    """Copies beside the messages, sums over backward passes, and Adam's update: bound by memory."""
    every_pass = (COPY_BYTES + SUM_BYTES / plan.degree(plan.gradients)) * parameters / machine.hbm_bytes_per_s
    return accumulation * every_pass + update_seconds(plan, parameters, machine)


def update_seconds(plan: Plan, parameters: int, machine: Machine) -> Value:
    """Of the optimizer: Adam's update."""
    return UPDATE_BYTES / plan.degree(plan.optimizer) * parameters / machine.hbm_bytes_per_s


def activations(config: GPTConfig, micro_batch: int = 1) -> int:
    """Bytes of a rank's activations."""
    return memory.activations(
        config.layers, config.hidden, config.seq_len, micro_batch, config.vocab, checkpointing=config.checkpointing
    )


@lru_cache(maxsize=256)
def layout_of(config: GPTConfig) -> Layout:
    """Layout of a GPT that is never allocated (meta device)."""
    with torch.device("meta"):
        return layout(GPT(config))


def _times(plan: Plan, collective: Collective, accumulation: int, assumed: Assumptions) -> Value:
    """How often a step makes a collective, with the copy of hpZ refilled as assumed. `Collective.times` has it refilled
    once a step: of all gathers one, per bucket, is global."""
    if not plan.has_secondary:
        return collective.times
    wide, all_gathers = assumed.global_gathers(accumulation), 2 * accumulation
    if collective.route is plan.moves.gather_weights:
        return collective.times * wide
    if collective.route is plan.moves.gather_secondary:
        return collective.times * (all_gathers - wide) / (all_gathers - 1)
    return collective.times
