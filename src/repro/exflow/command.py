"""What `repro place` runs: a trace file in, a placement file and its numbers out."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from repro.exflow.bound import gap, lower_bound
from repro.exflow.levels import Levels, make_levels
from repro.exflow.placement import TIME_LIMIT_S, Placement, Progress, evaluate, place
from repro.exflow.serving import fanout, replicas
from repro.exflow.serving.export import FORMATS
from repro.exflow.serving.fanout import fan_out, place_for_fanout
from repro.exflow.serving.replicas import evaluate_replicas, place_replicas
from repro.exflow.serving.slots import Replicas
from repro.exflow.trace import Trace, load, transitions
from repro.topology import Topology

WITH_COPIES = ("sglang", "vllm")  # formats that can say that an expert lies in several slots
OBJECTIVES = ("hops", *fanout.OBJECTIVES)
TOKENS_SHARE = 0.7  # of a time limit, when a search on whole tokens follows the one on pairs


def place_file(
    path: str | Path,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    method: str = "affinity",
    seed: int = 0,
    out: str | Path | None = None,
    *,
    top_k: int | None = None,
    num_experts: int | None = None,
    time_limit_s: float | None = None,
    rounds: int | None = None,
    costs: Sequence[float] | None = None,
    max_load: float | None = None,
    objective: str = "hops",
    extra_slots: int = 0,
    copies_for: str = "hops",
    out_format: str = "csv",
    dense_layers: int = 0,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Place the experts of the trace at `path` and say what it costs on that same trace.

    Arguments as in `placement.place` and `trace.load`, and
      objective    hops: what `place` minimises; new_gpus or gpus: a token-level search (`fanout.place_for_fanout`) goes on from there
      extra_slots  per GPU and layer, filled with copies of experts (`replicas.place_replicas`) to save `copies_for` (hops or load);
                   `max_load` is of the placement without them, and only copies for load keep it
      out          write the placement there in `out_format`, one of `export.FORMATS`, with `dense_layers` layers before the first
                   MoE layer for SGLang. With copies only the formats WITH_COPIES.
    Returns
      hops_per_token, crossing_fraction, intra_hops, inter_hops, max_load   as in `evaluate.Cost`
      bound, gap   crossing fraction that no placement without copies can beat, and (crossing - bound) / crossing
      seconds      time spent placing (not reading, bounding, adding copies or writing)
    and, for a topology, weighted_hops and the hops of each level, `NAME_hops`; with `max_load`, max_load_worst_layer; for k > 1,
    gpus, nodes, new_gpus and new_nodes of `fanout.FanOut`; with extra slots, what `replicas.ReplicaCost` says, `copies_NAME`.
    Raises ValueError and FileNotFoundError as those do.
    """
    _check(out, out_format, dense_layers, objective, max_load, extra_slots, copies_for)
    machine, on_tokens = make_levels(gpus, gpus_per_node, costs), objective != "hops"
    trace = load(path, num_experts, top_k)
    _check_copies(extra_slots, trace, machine)
    if on_tokens and len(machine.sizes) > 2:
        raise ValueError(f"objective is {objective}: knows GPUs and nodes, found {len(machine.sizes)} levels")
    counts, prices = transitions(trace), (machine.costs[0], machine.costs[-1])
    limit = (1 - TOKENS_SHARE) * time_limit_s if on_tokens and time_limit_s is not None else time_limit_s
    placement = place(
        counts, gpus, gpus_per_node, method, seed, limit, rounds, progress, costs=costs, max_load=max_load
    )
    seconds = placement.seconds
    if on_tokens:
        limit = TIME_LIMIT_S if time_limit_s is None else TOKENS_SHARE * time_limit_s
        placement = place_for_fanout(trace, placement, objective, prices, seed, limit, progress=progress)
        seconds += placement.seconds
    result = _numbers(placement, trace, counts, isinstance(gpus, Topology)) | {"seconds": seconds}
    placed: np.ndarray | Replicas = placement.gpu
    if extra_slots:
        placed = place_replicas(placement, trace, extra_slots, copies_for, prices, progress)
        result |= {f"copies_{name}": value for name, value in asdict(evaluate_replicas(placed, trace)).items()}
    if out is not None:
        FORMATS[out_format](placed, out, **({"dense_layers": dense_layers} if dense_layers else {}))
    return result


def _numbers(placement: Placement, trace: Trace, counts: np.ndarray, by_level: bool) -> dict[str, float]:
    """Cost, bound and gap of a placement on the trace and its counts."""
    cost, machine = evaluate(placement, counts), placement.machine
    names = ["hops_per_token", "crossing_fraction", "intra_hops", "inter_hops", "max_load"]
    if placement.max_load is not None:
        names.append("max_load_worst_layer")
    bound = lower_bound(counts, placement.gpus)
    result = {name: getattr(cost, name) for name in names}
    result |= {"bound": bound, "gap": gap(cost.crossing_fraction, bound)}
    if by_level:
        result["weighted_hops"] = cost.weighted_hops
        result |= {f"{name}_hops": hops for name, hops in zip(machine.names, cost.level_hops, strict=True)}
    return result | (asdict(fan_out(placement, trace)) if trace.k > 1 else {})


def _check(
    out: str | Path | None,
    out_format: str,
    dense_layers: int,
    objective: str,
    max_load: float | None,
    extra_slots: int,
    copies_for: str,
) -> None:
    if out_format not in FORMATS:
        raise ValueError(f"unknown format {out_format!r}, allowed: {', '.join(FORMATS)}")
    if dense_layers and out_format != "sglang":
        raise ValueError(
            f"dense_layers is {dense_layers}: only SGLang's format counts them, found format {out_format!r}"
        )
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}, allowed: {', '.join(OBJECTIVES)}")
    if objective != "hops" and max_load is not None:
        raise ValueError(f"max_load is {max_load}: kept with objective hops only, found {objective}")
    if copies_for not in replicas.OBJECTIVES:
        raise ValueError(f"copies_for is {copies_for!r}, allowed: {', '.join(replicas.OBJECTIVES)}")
    if extra_slots and out is not None and out_format not in WITH_COPIES:
        raise ValueError(f"format is {out_format}: it has no copies of experts, allowed: {', '.join(WITH_COPIES)}")


def _check_copies(extra_slots: int, trace: Trace, machine: Levels) -> None:
    most = trace.num_experts - trace.num_experts // machine.gpus
    if extra_slots > most:
        raise ValueError(f"extra_slots is {extra_slots}, allowed: 0 to {most}, where every GPU holds all experts")
    if extra_slots and trace.k > 1:
        raise ValueError(
            f"extra_slots is {extra_slots}: copies are for top-1 routing, found top-{trace.k}; use top_k 1"
        )
    if extra_slots and len(machine.sizes) > 2:
        raise ValueError(f"extra_slots is {extra_slots}: knows GPUs and nodes, found {len(machine.sizes)} levels")
