"""What `repro place` runs: a trace file in, a placement file and its numbers out."""

from collections.abc import Sequence
from pathlib import Path

from repro.exflow.bound import gap, lower_bound
from repro.exflow.export import FORMATS
from repro.exflow.placement import Progress, evaluate, place
from repro.exflow.trace import load, transitions
from repro.topology import Topology


def place_file(
    path: str | Path,
    gpus: int | Topology,
    gpus_per_node: int | None = None,
    method: str = "affinity",
    seed: int = 0,
    out: str | Path | None = None,
    top_k: int | None = None,
    time_limit_s: float | None = None,
    num_experts: int | None = None,
    out_format: str = "csv",
    dense_layers: int = 0,
    progress: Progress | None = None,
    rounds: int | None = None,
    costs: Sequence[float] | None = None,
    max_load: float | None = None,
) -> dict[str, float]:
    """Place the experts of the trace at `path` and say what it costs on that same trace.

    Arguments as in `placement.place` and `trace.load`; `out`: write the placement there in
    `out_format`, one of `export.FORMATS`, with `dense_layers` layers before the first MoE layer for SGLang. Returns
      hops_per_token, crossing_fraction, intra_hops, inter_hops, max_load   as in `evaluate.Cost`
      bound, gap   crossing fraction that no placement can beat, and (crossing - bound) / crossing
      seconds      time spent placing (not reading, bounding or writing)
    and, for a topology, weighted_hops and the hops of each level, `NAME_hops`; with `max_load`, max_load_worst_layer.
    Raises ValueError and FileNotFoundError as those do.
    """
    if out_format not in FORMATS:
        raise ValueError(f"unknown format {out_format!r}, allowed: {', '.join(FORMATS)}")
    if dense_layers and out_format != "sglang":
        raise ValueError(
            f"dense_layers is {dense_layers}: only SGLang's format counts them, found format {out_format!r}"
        )
    counts = transitions(load(path, num_experts, top_k))
    placement = place(
        counts, gpus, gpus_per_node, method, seed, time_limit_s, rounds, progress, costs=costs, max_load=max_load
    )
    cost = evaluate(placement, counts)
    bound = lower_bound(counts, placement.gpus)
    if out is not None:
        options = {"dense_layers": dense_layers} if dense_layers else {}
        FORMATS[out_format](placement.gpu, out, **options)
    result = {
        "hops_per_token": cost.hops_per_token,
        "crossing_fraction": cost.crossing_fraction,
        "intra_hops": cost.intra_hops,
        "inter_hops": cost.inter_hops,
        "bound": bound,
        "gap": gap(cost.crossing_fraction, bound),
        "seconds": placement.seconds,
        "max_load": cost.max_load,
    }
    if isinstance(gpus, Topology):
        result["weighted_hops"] = cost.weighted_hops
        result |= {f"{name}_hops": hops for name, hops in zip(gpus.names, cost.level_hops, strict=True)}
    if max_load is not None:
        result["max_load_worst_layer"] = cost.max_load_worst_layer
    return result
