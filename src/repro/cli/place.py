"""`repro place`: a routing trace in, a placement file and its numbers out."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from repro.cli.console import Json, emit, progress, stdout, user_errors

if TYPE_CHECKING:  # loading these takes a second, and `repro --help` waits for none
    import numpy as np

    from repro.exflow import Placement, Replicas, Trace
    from repro.exflow.levels import Levels

REPLICATED = ("sglang", "vllm")  # formats that can say that an expert lies in several slots
TOKENS_SHARE = 0.7  # of a time limit, when a search on whole tokens follows the one on pairs


def place(
    trace: Annotated[
        Path, typer.Argument(help=".npy (tokens x layers, or tokens x layers x k), .npz with `experts`, or .parquet.")
    ],
    gpus: Annotated[int | None, typer.Option(min=1, help="How many; or see --levels.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Default: all GPUs are in one node.")] = None,
    levels: Annotated[
        str | None,
        typer.Option(metavar="NAME=SIZE,...", help="Instead of --gpus, innermost first: node=8,rack=4 has 32 GPUs."),
    ] = None,
    costs: Annotated[
        str | None, typer.Option(metavar="X,...", help="Of a hop at each level, innermost first; default: 1,2,3,...")
    ] = None,
    max_load: Annotated[
        float | None, typer.Option(help="Most tokens of a layer's busiest GPU, in even shares: 1.2 allows 20 % more.")
    ] = None,
    method: Literal["contiguous", "random", "exflow", "exflow-direct", "affinity"] = "affinity",
    objective: Annotated[
        Literal["hops", "new_gpus", "gpus"],
        typer.Option(
            help="hops, between a token's experts in pairs; for top-k, the GPUs of whole tokens: new_gpus, those that "
            "a token was not on in the layer before, or gpus, all that it visits from its home."
        ),
    ] = "hops",
    extra_slots: Annotated[
        int,
        typer.Option(min=0, help="Slots of a GPU and layer for copies of experts (top-1; formats sglang and vllm)."),
    ] = 0,
    copies_for: Annotated[
        Literal["hops", "load"], typer.Option(help="What copies save: hops, or load of the busiest GPU.")
    ] = "hops",
    num_experts: Annotated[
        int | None, typer.Option(min=1, help="Experts per layer; default: the file's, else the highest id + 1.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Use the first k experts of each token; default: all.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds, all used unless the result is proven; default: 60 rounds in at most 30 s. Copies on top.",
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=0, help="Of search: with --seed they fix the result of objective hops.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write CSV `Expert,Node`: expert e of layer l is l*E + e, Node its GPU.")
    ] = None,
    format_: Annotated[
        Literal["csv", "sglang", "vllm", "vllm-ascend"],
        typer.Option("--format", help="Of --out: csv, or an expert map (JSON) for a server (proposed in vLLM)."),
    ] = "csv",
    dense_layers: Annotated[
        int, typer.Option(min=0, help="With --format sglang: layers before the first MoE layer (3 for DeepSeek-V3).")
    ] = 0,
    json_: Json = False,
) -> None:
    """Place the experts of an MoE model on GPUs so that tokens of this routing trace stay where they are.

    Prints hops per token and layer and the load of the busiest GPU, on this same trace; `bound`, the crossing fraction
    that no placement without copies can beat, and `gap`, the share of the crossings above it; the seconds spent
    placing. With --levels also the hops of each level; for top-k the GPUs and nodes of whole tokens; with --extra-slots
    the same numbers of the placement with copies.
    """
    with user_errors(), _option_names(), progress(f"placing with {method}") as update:
        from repro import exflow
        from repro.exflow.levels import make_levels, parse_levels
        from repro.exflow.placement import TIME_LIMIT_S

        on_tokens = objective != "hops"
        if on_tokens and max_load is not None:
            raise ValueError(f"max_load is {max_load}: kept with objective hops only, found {objective}")
        if max_load is not None and extra_slots and copies_for == "hops":
            raise ValueError(f"--max-load {max_load:g}: copies for hops may exceed it; use --copies-for load")
        _check_output(out, format_, dense_layers, extra_slots)
        if (gpus is None) == (levels is None):
            raise ValueError("--gpus and --levels: give one of them")
        with _naming(f"--levels {levels}"):
            machine = gpus if gpus is not None else parse_levels(levels or "")
        with _naming(f"--costs {costs}"):
            prices = None if costs is None else [float(cost) for cost in costs.split(",")]
        known = make_levels(machine, gpus_per_node, prices)
        routing = exflow.load_trace(trace, num_experts, top_k)
        _check_extra_slots(extra_slots, routing, known)
        if on_tokens and len(known.sizes) > 2:
            raise ValueError(f"objective is {objective}: knows GPUs and nodes, found {len(known.sizes)} levels")

        counts, ends = exflow.transitions(routing), (known.costs[0], known.costs[-1])
        limit = (1 - TOKENS_SHARE) * time_limit if on_tokens and time_limit is not None else time_limit
        search = (method, seed, limit, rounds, update)
        placement = exflow.place(counts, machine, gpus_per_node, *search, costs=prices, max_load=max_load)
        seconds = placement.seconds
        if on_tokens:
            limit = TIME_LIMIT_S if time_limit is None else TOKENS_SHARE * time_limit
            placement = exflow.place_for_fanout(routing, placement, objective, ends, seed, limit, progress=update)
            seconds += placement.seconds
        result = _numbers(placement, routing, counts, levels is not None) | {"seconds": seconds}
        placed: np.ndarray | Replicas = placement.gpu
        if extra_slots:
            placed = exflow.place_replicas(placement, routing, extra_slots, copies_for, ends, update)
            found = asdict(exflow.evaluate_replicas(placed, routing))
            result |= {f"copies_{name}": value for name, value in found.items()}
        if out is not None:
            exflow.FORMATS[format_](placed, out, **({"dense_layers": dense_layers} if dense_layers else {}))
    if json_:
        return emit(result)
    for name, value in result.items():
        stdout.print(f"{name:27} {value:.4f}")


@contextlib.contextmanager
def _option_names() -> Iterator[None]:
    """A ValueError about a parameter, `max_load is 0.5: ...`, names the option that the user knows, --max-load."""
    try:
        yield
    except ValueError as error:
        parameter, is_, rest = str(error).partition(" ")
        if parameter not in {name.rstrip("_") for name in place.__annotations__}:
            raise
        raise ValueError(f"--{parameter.replace('_', '-')}{is_}{rest}") from error


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """A ValueError from inside begins with `option`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _numbers(placement: "Placement", routing: "Trace", counts: "np.ndarray", by_level: bool) -> dict[str, float]:
    """Cost, bound and gap of a placement on the trace and its counts."""
    from repro import exflow

    cost, bound = exflow.evaluate(placement, counts), exflow.lower_bound(counts, placement.gpus)
    names = ["hops_per_token", "crossing_fraction", "intra_hops", "inter_hops", "max_load"]
    names += ["max_load_worst_layer"] * (placement.max_load is not None)
    result = {name: getattr(cost, name) for name in names}
    result |= {"bound": bound, "gap": exflow.gap(cost.crossing_fraction, bound)}
    if by_level:
        result["weighted_hops"] = cost.weighted_hops
        by_name = zip(placement.machine.names, cost.level_hops, strict=True)
        result |= {f"{name}_hops": hops for name, hops in by_name}
    return result | (asdict(exflow.fan_out(placement, routing)) if routing.k > 1 else {})


def _check_output(out: Path | None, format_: str, dense_layers: int, extra_slots: int) -> None:
    if dense_layers and format_ != "sglang":
        raise ValueError(f"dense_layers is {dense_layers}: only SGLang's format counts them, found format {format_!r}")
    if out is None:
        return
    if format_ == "sglang" and out.suffix != ".json":
        raise ValueError(f"--out {out}: SGLang reads a file as JSON when its name ends in .json")
    if extra_slots and format_ not in REPLICATED:
        raise ValueError(f"format is {format_}: it has no copies of experts, allowed: {', '.join(REPLICATED)}")
    if out.is_dir():
        raise ValueError(f"--out {out}: is a folder")


def _check_extra_slots(extra_slots: int, routing: "Trace", machine: "Levels") -> None:
    most = routing.num_experts - routing.num_experts // machine.gpus
    if extra_slots > most:
        raise ValueError(f"extra_slots is {extra_slots}, allowed: 0 to {most}, where every GPU holds all experts")
    if extra_slots and routing.k > 1:
        raise ValueError(
            f"extra_slots is {extra_slots}: copies are for top-1 routing, found top-{routing.k}; use --top-k 1"
        )
    if extra_slots and len(machine.sizes) > 2:
        raise ValueError(f"extra_slots is {extra_slots}: knows GPUs and nodes, found {len(machine.sizes)} levels")
