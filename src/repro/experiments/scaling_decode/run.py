"""Place on a trace, and predict an iteration of every mode."""

from dataclasses import replace

from repro import exflow, scaling
from repro.experiments.base import Outcome
from repro.experiments.common.trace_files import open_trace
from repro.experiments.common.traces import ROUNDS
from repro.experiments.scaling_decode import MODES, PER_NODE, PLACEMENTS, ScalingDecode, ScalingDecodeMetrics
from repro.scaling import decode
from repro.scaling.whatif import bands


def run(point: ScalingDecode) -> Outcome:
    """Bands of tokens per second of every mode, and of the paper's two ratios against two all-to-alls."""
    routings = {method: _routing(point, method) for method in PLACEMENTS}
    contiguous, affinity = routings["contiguous"], routings["affinity"]
    machine = scaling.hardware("wilkes3").machine(point.gpus // PER_NODE, point.draws, point.seed)
    model = decode.paper_model(point.experts, point.hidden)
    size = (model, machine, point.tokens_per_gpu, point.context)
    # At home a token's expert may be anywhere; between layers it is where it was placed. Loads are as uneven.
    from_home = replace(decode.uniform(machine), max_load=contiguous.max_load)
    found = {
        "two_all_to_alls": decode.iteration(*size, "two_all_to_alls", from_home),
        "coherent": decode.iteration(*size, "coherent", contiguous),
        "placed": decode.iteration(*size, "placed", affinity),
        "kv_sent": decode.iteration(*size, "placed", affinity, kv_sent=True),
        # As if every GPU had as many tokens: what the placement is worth where training evens the load.
        "balanced": decode.iteration(*size, "placed", replace(affinity, max_load=1.0)),
    }
    even_base = decode.iteration(*size, "two_all_to_alls", decode.uniform(machine))
    values = {}
    for name, ours in found.items():
        values |= {f"tokens_per_s_{name}": ours.tokens_per_s, f"routing_s_{name}": ours.all_to_all_s}
        base = even_base if name == "balanced" else found["two_all_to_alls"]
        if name in MODES[1:]:
            values[f"speedup_{name}"] = base.seconds / ours.seconds
            values[f"routing_reduction_{name}"] = 1 - ours.all_to_all_s / base.all_to_all_s
    counted = {}
    for name, routing in routings.items():
        counted[f"crossing_{name}"] = routing.crossing_fraction
        counted[f"node_crossing_{name}"] = routing.node_crossing_fraction
        counted[f"max_load_{name}"] = routing.max_load
    metrics = ScalingDecodeMetrics(**bands(values), **counted)
    return Outcome(metrics, "modelled", topology=f"Wilkes3, {point.gpus} A100 (arithmetic)")


def _routing(point: ScalingDecode, method: str) -> decode.Routing:
    """What a placement does to the tokens of held-out text, on our trained model of as many experts."""
    train, held_out = open_trace(f"gpt_moe_{point.experts}e", point.seed).parts()
    counts = exflow.transitions(train)
    placement = exflow.place(counts, point.gpus, PER_NODE, method, point.seed, point.time_limit_s, ROUNDS)
    cost = exflow.evaluate(placement, held_out)
    return decode.Routing(cost.crossing_fraction, cost.node_crossing_fraction, cost.max_load)
