"""Place on a trace, and predict an iteration of every mode."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from repro import exflow, scaling
from repro.exflow.trace import Trace
from repro.experiments.base import Outcome
from repro.experiments.common.trace_files import open_trace
from repro.experiments.common.traces import ROUNDS
from repro.experiments.scaling_decode import (
    BASELINES,
    BATCHES,
    MODES,
    PER_NODE,
    PLACEMENTS,
    ScalingDecode,
    ScalingDecodeMetrics,
)
from repro.scaling import decode
from repro.scaling.machines import Machine
from repro.scaling.network import Value
from repro.scaling.whatif import bands


def run(point: ScalingDecode) -> Outcome:
    """Bands of tokens per second of every mode, and of the paper's two ratios against each baseline."""
    train, held_out = open_trace(f"gpt_moe_{point.experts}e", point.seed).parts()
    routings = {method: _routing(point, method, train, held_out) for method in PLACEMENTS}
    machine = scaling.hardware("wilkes3").machine(point.gpus // PER_NODE, point.draws, point.seed)
    batches = _batches(point)
    sizes = np.unique(batches).tolist()
    points = [point.model_copy(update={"tokens_per_gpu": size}) for size in sizes]
    found = [_values(each, machine, routings, held_out) for each in points]
    mine = [batches == size for size in sizes]
    values = {name: np.select(mine, [each[name] for each in found]) for name in found[0]}
    counted = {}
    for name, routing in routings.items():
        counted[f"crossing_{name}"] = routing.crossing_fraction
        counted[f"node_crossing_{name}"] = routing.node_crossing_fraction
        counted[f"max_load_{name}"] = routing.max_load
    metrics = ScalingDecodeMetrics(**bands(values), **counted)
    return Outcome(metrics, "modelled", topology=f"Wilkes3, {point.gpus} A100 (arithmetic)")


def _batches(point: ScalingDecode) -> NDArray[np.int64]:
    """[draws] tokens of a GPU: as many as the point says, or each of `BATCHES` as often, in a random order."""
    sizes = (point.tokens_per_gpu,) if point.tokens_per_gpu else BATCHES
    return np.random.default_rng([point.seed, *b"tokens_per_gpu"]).permutation(np.resize(sizes, point.draws))


def _values(
    point: ScalingDecode, machine: Machine, routings: Mapping[str, decode.Routing], held_out: Trace
) -> dict[str, Value]:
    """[draws] of each metric that has a band, with as many tokens of a GPU as the point says."""
    padding = _padding(point, held_out)
    exact = _iterations(point, machine, routings, padding)
    found = {
        name: each.with_exchanges(decode.exchange_error(name, point.draws, point.seed)) for name, each in exact.items()
    }
    even_base = found.pop("even")
    values: dict[str, Value] = {f"padding_{base}": factor for base, factor in padding.items()}
    for name, ours in found.items():
        values |= {f"tokens_per_s_{name}": ours.tokens_per_s, f"routing_s_{name}": ours.routing_s}
        values[f"all_to_all_share_{name}"] = ours.all_to_all_share
    for name in MODES[1:]:
        values |= _gain(name, found[name], even_base if name == "balanced" else found["two_all_to_alls"])
    for base, name in BASELINES.items():
        values |= _gain(f"over_{base}", found[name], found[base])
    return values


def _routing(point: ScalingDecode, method: str, train: Trace, held_out: Trace) -> decode.Routing:
    """What a placement does to the tokens of held-out text, on our trained model of as many experts."""
    counts = exflow.transitions(train)
    placement = exflow.place(counts, point.gpus, PER_NODE, method, point.seed, point.time_limit_s, ROUNDS)
    cost = exflow.evaluate(placement, held_out)
    return decode.Routing(cost.crossing_fraction, cost.node_crossing_fraction, cost.max_load)


def _padding(point: ScalingDecode, held_out: Trace) -> dict[str, float]:
    """By baseline: places in the buffers of a GPU over its tokens."""
    popularity = np.stack([np.bincount(layer, minlength=point.experts) for layer in held_out.top(1).experts.T])
    size = (point.gpus, point.tokens_per_gpu)
    return {
        "deepspeed": decode.full_buffers(popularity / held_out.tokens, *size, seed=point.seed),
        "deepspeed_even": decode.full_buffers(
            np.full_like(popularity, 1 / point.experts, float), *size, seed=point.seed
        ),
        "deepspeed_dropping": decode.dropping_buffers(point.experts, point.tokens_per_gpu),
    }


def _iterations(
    point: ScalingDecode, machine: Machine, routings: Mapping[str, decode.Routing], padding: Mapping[str, float]
) -> dict[str, decode.Iteration]:
    """By mode and baseline; `even`: two all-to-alls with an even load."""
    contiguous, affinity = routings["contiguous"], routings["affinity"]
    # At home a token's expert may be anywhere; between layers it is where it was placed. Loads are as uneven.
    from_home = replace(decode.uniform(machine), max_load=contiguous.max_load)
    return {
        "two_all_to_alls": _iteration(point, machine, "two_all_to_alls", from_home),
        "coherent": _iteration(point, machine, "coherent", contiguous),
        "placed": _iteration(point, machine, "placed", affinity),
        "kv_sent": _iteration(point, machine, "placed", affinity, kv_sent=True),
        # As if every GPU had as many tokens: what the placement is worth where training evens the load.
        "balanced": _iteration(point, machine, "placed", replace(affinity, max_load=1.0)),
        "even": _iteration(point, machine, "two_all_to_alls", decode.uniform(machine)),
    } | {
        base: _iteration(point, machine, "two_all_to_alls", decode.padded(machine, factor))
        for base, factor in padding.items()
    }


def _iteration(
    point: ScalingDecode, machine: Machine, mode: decode.Mode, routing: decode.Routing, *, kv_sent: bool = False
) -> decode.Iteration:
    model = decode.paper_model(point.experts, point.hidden)
    return decode.iteration(model, machine, point.tokens_per_gpu, point.context, mode, routing, kv_sent=kv_sent)


def _gain(name: str, ours: decode.Iteration, base: decode.Iteration) -> dict[str, Value]:
    """The paper's two ratios."""
    reduction = 1 - ours.routing_s / base.routing_s
    return {f"speedup_{name}": base.seconds / ours.seconds, f"routing_reduction_{name}": reduction}
