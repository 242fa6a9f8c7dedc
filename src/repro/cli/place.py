"""`repro place`: a routing trace in, a placement file and its numbers out."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from repro.cli import served
from repro.cli.clock import Clock
from repro.cli.console import Json, progress, stderr, user_errors
from repro.cli.place_options import (
    check_copies,
    check_extra_slots,
    check_limits,
    check_modes,
    check_objective,
    check_output,
    compile_kernels,
    machine_of,
    option_names,
    placement_of_file,
)
from repro.cli.placed import numbers, show
from repro.cli.search import Search

BOUND_S = 30.0  # most seconds for the bound where there is no time limit
INTERRUPTED = 130  # exit code, as of a shell: 128 + SIGINT


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
    evaluate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Count this placement, a CSV as --out writes it, instead of searching one."),
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
        typer.Option(
            min=0,
            help="Slots per GPU and layer for copies of experts (top-1; formats sglang and vllm). They save hops and, with "
            "--max-load, bring the load as near to that as they can.",
        ),
    ] = 0,
    dispatch: Annotated[
        Literal["nearest", "round_robin", "shares"],
        typer.Option(
            help="Which copy the server gives a token to: the nearest (SGLang, static), all in turn (vLLM; SGLang, "
            "dynamic), or shares by the GPU of the token, which no file of a server holds."
        ),
    ] = "nearest",
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Print hops against load of several placements instead (top-1).")
    ] = False,
    update: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Change this placement (CSV, or a map of sglang or vllm) instead (top-1)."),
    ] = None,
    moves: Annotated[
        int | None,
        typer.Option(min=0, help="With --update: most experts that come to another GPU. Default: any number."),
    ] = None,
    tokens_needed: Annotated[
        bool,
        typer.Option("--tokens-needed", help="Say how many tokens to record for a placement of this machine."),
    ] = False,
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
            help="Seconds for all, from reading the trace to the bound; all used unless the result is proven. Imports and "
            "compilation are not counted. Default: 60 rounds in at most 30 s, 30 s for the bound; another "
            "--objective 30 s more; copies, --pareto and --tokens-needed take what their rounds take.",
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
        int,
        typer.Option(
            min=0, max=4096, help="With --format sglang: layers before the first MoE layer (3 for DeepSeek-V3)."
        ),
    ] = 0,
    json_: Json = False,
) -> None:
    """Place the experts of an MoE model on GPUs so that tokens of this routing trace stay where they are.

    Prints hops per token and layer and the load of the busiest GPU, on this same trace; `bound`, the crossing fraction
    that no placement without copies can beat, and `gap`, the share of the crossings above it; `bound_share`, the share
    of the pairs of layers whose bound was complete in time, 1 unless --time-limit is short for the number of experts;
    the seconds spent placing. With --levels also the hops of each level; for top-k the GPUs and nodes of whole tokens;
    with --extra-slots the same numbers of the placement with copies.

    With --pareto the hops and loads of placements from the most even to the one with the fewest hops; with --update
    those before and after the best change found with at most --moves experts; with --tokens-needed how many tokens
    are enough, by what placements by parts of the sequences lose on the others; each search gets an equal part of
    --time-limit, and it is said how many were cut.

    With --evaluate the same numbers of a placement that somebody else made.

    Ctrl-C ends the search: the best placement so far is written, and the exit code is 130. A second one ends at once.
    """
    with user_errors(), option_names(place.__annotations__), progress(f"placing with {method}") as update_bar:
        from repro import exflow

        modes = {"--pareto": pareto, "--update": update, "--tokens-needed": tokens_needed, "--evaluate": evaluate}
        check_limits(objective, max_load, evaluate, time_limit)
        check_modes(modes, objective, dispatch, out, moves)
        if pareto and max_load is not None:
            raise ValueError(f"max_load is {max_load}: --pareto tries limits of its own; give one of them")
        if method != "affinity" and (named := [name for name, asked in modes.items() if asked]):
            raise ValueError(f"method is {method}: {named[0]} does not use it; allowed: affinity")
        check_output(out, format_, dense_layers, extra_slots)
        machine, prices, known = machine_of(gpus, gpus_per_node, levels, costs)
        check_objective(objective, known)
        compile_kernels(objective != "hops", bool(extra_slots or pareto or update))
        clock = Clock(math.inf if time_limit is None else time_limit)
        routing = exflow.load_trace(trace, num_experts, top_k)
        check_extra_slots(extra_slots, routing, known)
        old = None if update is None else served.read_old(update, routing, known, dense_layers)
        if old is not None and out is not None:
            check_copies(old.physical_to_logical.shape[1] > old.num_experts, format_)
        search = Search(
            routing=routing,
            counts=exflow.transitions(routing),
            machine=machine,
            gpus_per_node=gpus_per_node,
            costs=prices,
            levels=known,
            max_load=max_load,
            extra_slots=extra_slots,
            dispatch=dispatch,
            rounds=rounds,
            limited=time_limit is not None,
            seed=seed,
            progress=update_bar,
            clock=clock,
        )

        def write(placed: Any) -> None:
            if out is not None:
                exflow.FORMATS[format_](placed, out, **({"dense_layers": dense_layers} if dense_layers else {}))

        with clock.stopped_by_interrupts():
            if tokens_needed:
                served.show_needed(search.tokens_needed())
                return _end(clock, None)
            if pareto:
                served.show_front(search.front(), routing, dispatch, json_)
                return _end(clock, None)
            copied = None
            if old is not None:
                write(copied := search.copies(old, moves))
                result = served.change(old, copied, routing, dispatch)
            else:
                placed = placement_of_file(evaluate, routing, known) if evaluate else search.experts(method, objective)
                if extra_slots:
                    copied = search.copies(placed)
                write(copied or placed.gpu)
                proving = clock.within(BOUND_S) if time_limit is None else clock
                result = numbers(placed, routing, search.counts, levels is not None, proving)
            if copied is not None:
                result |= served.numbers(copied, routing, dispatch, "copies_")
    show(result, json_)
    _end(clock, out)


def _end(clock: Clock, out: Path | None) -> None:
    """After Ctrl-C, say that this is not all, and exit with its code."""
    if clock.interrupted:
        where = "" if out is None else f", and is in {out}"
        stderr.print(escape(f"interrupted: this is the best that was found until then{where}"), soft_wrap=True)
        raise typer.Exit(INTERRUPTED)
