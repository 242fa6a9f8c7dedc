"""`repro place`: the options of `exflow.place_file`, and errors that name them."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from repro.cli.console import Json, emit, progress, stdout, user_errors

WIDTH = 27  # of names in the result


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


def _parsed(option: str, parse: Callable[[str], Any], text: str) -> Any:
    """`parse(text)`; a ValueError names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option} {text}: {error}") from error


def place(
    trace: Annotated[
        Path,
        typer.Argument(help=".npy (tokens x layers, or tokens x layers x k), .npz with `experts`, or .parquet."),
    ],
    gpus: Annotated[int | None, typer.Option(min=1, help="How many; or see --levels.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="Default: all GPUs are in one node.")] = None,
    levels: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SIZE,...",
            help="Instead of --gpus, a machine of any depth, innermost level first: node=8,rack=4,cluster=2 has 64 GPUs.",
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(metavar="X,...", help="Cost of a hop at each level, innermost first; default: 1,2,3,..."),
    ] = None,
    max_load: Annotated[
        float | None,
        typer.Option(
            help="Most tokens of a layer's busiest GPU, in even shares: 1.2 allows 20 % more. Default: no limit."
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="contiguous, random, exflow, exflow-direct or affinity.")] = "affinity",
    objective: Annotated[
        str,
        typer.Option(
            help="hops, between a token's experts in pairs; for top-k, the GPUs of whole tokens: new_gpus, those that a token was not "
            "on in the layer before, or gpus, all that it visits from its home."
        ),
    ] = "hops",
    extra_slots: Annotated[
        int,
        typer.Option(min=0, help="Slots of a GPU and layer for copies of experts (top-1; formats sglang and vllm)."),
    ] = 0,
    copies_for: Annotated[str, typer.Option(help="What copies save: hops, or load of the busiest GPU.")] = "hops",
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
            help="Seconds, all of them used unless the result is proven; default: 60 rounds in at most 30 s. Copies come on top.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Rounds of search: with --seed they fix the result of objective hops; default: see --time-limit.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the placement: as CSV `Expert,Node`, expert e of layer l is l*E + e, Node is its GPU; or see --format."
        ),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="Of --out: csv, or an expert map (JSON) for sglang, vllm-ascend, or vllm (proposed there)."
        ),
    ] = "csv",
    dense_layers: Annotated[
        int, typer.Option(min=0, help="With --format sglang: layers before the first MoE layer (3 for DeepSeek-V3).")
    ] = 0,
    json_: Json = False,
) -> None:
    """Place the experts of an MoE model on GPUs so that tokens of this routing trace stay where they are."""
    with user_errors(), _option_names(), progress(f"placing with {method}") as update:
        from repro import exflow

        if (gpus is None) == (levels is None):
            raise ValueError("--gpus and --levels: give one of them")
        machine = gpus if levels is None else _parsed("--levels", exflow.parse_levels, levels)
        prices = costs and _parsed("--costs", lambda text: tuple(map(float, text.split(","))), costs)
        if max_load is not None and extra_slots and copies_for == "hops":
            raise ValueError(f"--max-load {max_load:g}: copies for hops may exceed it; use --copies-for load")
        if out is not None and format_ == "sglang" and out.suffix != ".json":
            raise ValueError(f"--out {out}: SGLang reads a file as JSON when its name ends in .json")
        if out is not None and out.is_dir():
            raise ValueError(f"--out {out}: is a folder")
        options = {"top_k": top_k, "num_experts": num_experts, "time_limit_s": time_limit, "progress": update}
        options |= {"out_format": format_, "dense_layers": dense_layers}
        options |= {"rounds": rounds, "costs": prices, "max_load": max_load, "objective": objective}
        options |= {"extra_slots": extra_slots, "copies_for": copies_for}
        result = exflow.place_file(trace, machine, gpus_per_node, method, seed, out, **options)
    if json_:
        return emit(result)
    for name, value in result.items():
        stdout.print(f"{name:{WIDTH}} {value:.4f}")
