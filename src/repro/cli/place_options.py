"""What the options of `repro place` stand for, and which of them are refused."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from repro.cli.console import try_output

if TYPE_CHECKING:  # loading these takes a second, and `repro --help` waits for none
    from repro.exflow import Placement, Trace
    from repro.exflow.levels import Levels
    from repro.topology import Topology

REPLICATED = ("sglang", "vllm")  # formats that can say that an expert lies in several slots
TAKEN = ("intra", "inter", "weighted", "copies_intra", "copies_inter")  # NAME_hops of the result that are of no level


def machine_of(
    gpus: int | None, gpus_per_node: int | None, levels: str | None, costs: str | None
) -> tuple["int | Topology", list[float] | None, "Levels"]:
    """(what `exflow.place` gets as GPUs, costs of hops or None, the levels that these make)."""
    from repro.exflow.levels import make_levels, parse_levels

    if (gpus is None) == (levels is None):
        raise ValueError("--gpus and --levels: give one of them")
    with _naming(f"--levels {levels}"):
        machine = gpus if gpus is not None else parse_levels(levels or "")
    with _naming(f"--costs {costs}"):
        prices = None if costs is None else [float(cost) for cost in costs.split(",")]
    known = make_levels(machine, gpus_per_node, prices)
    for name in set(known.names) & set(TAKEN):
        raise ValueError(f"--levels {levels}: {name}_hops is of something else in the result, allowed: any other name")
    return machine, prices, known


def placement_of_file(path: Path, routing: "Trace", machine: "Levels") -> "Placement":
    """The placement of a file, for the layers and experts of the trace."""
    from repro import exflow

    gpu = exflow.read_csv(path, routing.layers, routing.num_experts, machine.gpus)
    per_node = machine.spans[machine.node_level]
    return exflow.Placement(gpu, machine.gpus, per_node, "evaluated", f"read from {path}", levels=machine)


def compile_kernels(on_tokens: bool, copies: bool) -> None:
    """Compile what numba compiles, or load it from its cache, before the clock starts: seconds the first time."""
    import numpy as np

    from repro import exflow
    from repro.exflow import bound
    from repro.exflow.search import portfolio

    trace = exflow.Trace(np.array([[[0, 1], [2, 3]]]), 4)
    counts = exflow.transitions(trace)
    portfolio.compile_kernels()
    bound.compile_kernels()
    if copies:
        exflow.place_copies(counts, 2, rounds=0)
    if on_tokens:
        exflow.place_for_fanout(trace, exflow.place(counts, 2, method="contiguous"), sweeps=1)


@contextlib.contextmanager
def option_names(parameters: Iterable[str]) -> Iterator[None]:
    """A ValueError about a parameter, `max_load is 0.5: ...`, names the option that the user knows, --max-load."""
    try:
        yield
    except ValueError as error:
        parameter, is_, rest = str(error).partition(" ")
        if parameter not in {name.rstrip("_") for name in parameters}:
            raise
        raise ValueError(f"--{parameter.replace('_', '-')}{is_}{rest}") from error


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """A ValueError from inside begins with `option`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def check_modes(given: dict[str, Any], objective: str, dispatch: str, out: Path | None, moves: int | None) -> None:
    """ValueError where options of the modes beyond placing once exclude each other; `given`: mode to what was asked."""
    given = given | {f"--objective {objective}": objective != "hops"}
    modes = [name for name, asked in given.items() if asked]
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(modes)}: give one of them")
    if moves is not None and modes != ["--update"]:
        raise ValueError(f"moves is {moves}: counts from an old placement, give --update")
    if out is not None and modes and modes[0] in ("--pareto", "--tokens-needed"):
        raise ValueError(f"--out {out}: {modes[0]} writes no placement")
    if out is not None and dispatch == "shares":
        raise ValueError(f"dispatch is {dispatch}: no format of --out holds the shares, allowed: nearest, round_robin")


def check_limits(objective: str, max_load: float | None, evaluate: Path | None, time_limit: float | None) -> None:
    if objective != "hops" and max_load is not None:
        raise ValueError(f"max_load is {max_load}: kept with objective hops only, found {objective}")
    if evaluate is not None and (objective != "hops" or max_load is not None):
        raise ValueError(f"--evaluate {evaluate}: nothing is searched, so neither --objective nor --max-load applies")
    if time_limit is not None and not 0.0 < time_limit < math.inf:
        raise ValueError(f"time_limit is {time_limit}, must be positive and finite")


def check_objective(objective: str, machine: "Levels") -> None:
    if objective != "hops" and len(machine.sizes) > 2:
        raise ValueError(f"objective is {objective}: knows GPUs and nodes, found {len(machine.sizes)} levels")


def check_output(out: Path | None, format_: str, dense_layers: int, extra_slots: int) -> None:
    if dense_layers and format_ != "sglang":
        raise ValueError(f"dense_layers is {dense_layers}: only SGLang's format counts them, found format {format_!r}")
    if out is None:
        return
    if format_ == "sglang" and out.suffix != ".json":
        raise ValueError(f"--out {out}: SGLang reads a file as JSON when its name ends in .json")
    check_copies(extra_slots > 0, format_)
    try_output(out)


def check_copies(has: bool, format_: str) -> None:
    if has and format_ not in REPLICATED:
        raise ValueError(f"format is {format_}: it has no copies of experts, allowed: {', '.join(REPLICATED)}")


def check_extra_slots(extra_slots: int, routing: "Trace", machine: "Levels") -> None:
    most = routing.num_experts - routing.num_experts // machine.gpus
    if extra_slots > most:
        raise ValueError(f"extra_slots is {extra_slots}, allowed: 0 to {most}, where every GPU holds all experts")
    if extra_slots and routing.k > 1:
        raise ValueError(
            f"extra_slots is {extra_slots}: copies are for top-1 routing, found top-{routing.k}; use --top-k 1"
        )
