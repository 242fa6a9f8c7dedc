"""How near the lower bounds are to the best placement found: `python benchmarks/placement_bounds.py`.

Instances are the shipped routings, top-1, all tokens. Everything runs on one thread. Columns:

    found    share of transitions that change GPU, of the best placement that `--search-seconds` find; with `load` at
             most that many times the even share of tokens on the busiest GPU of any layer; `least`: in each layer as
             little as was found possible; with `slots` so many redundant ones per GPU and layer, filled for hops
    quick    the bound without the semidefinite program (b-matching and spectrum), and its gap
    bound    with it, at most `--bound-seconds`, or of the replicated problem, and its gap
    s        seconds that it took; less than the limit where it converged
    s to 15% until found / bound - 1 was at most 15 %
    gap      found / bound - 1: no placement can be better by more
"""

import argparse
import csv
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro import exflow, paths
from repro.exflow.bound import sdp
from repro.exflow.evaluate import loads
from repro.exflow.search import balance
from repro.exflow.search.problem import ROUNDING

ROUTINGS = (
    ("gptoss20b_routing", (2, 4, 8, 16)),
    ("gpt_moe_routing_8e", (2, 4)),
    ("gpt_moe_routing_16e", (2, 4, 8)),
    ("gpt_moe_routing_16e_shakespeare", (2, 4, 8)),
    ("gpt_moe_routing_32e", (2, 4, 8, 16)),
    ("gpt_moe_routing_64e", (2, 4, 8, 16)),
)
SLOTS = (1, 2, 4)  # redundant ones, where they are asked for
LOAD = 1.05  # times the lowest limit on load that can be kept in every layer, where it is asked for
CLOSE = 0.15


@dataclass(frozen=True)
class Row:
    """One instance; `close_s` None: not reached."""

    routing: str
    gpus: int
    load: float | str | None
    slots: int
    found: float
    quick: float
    bound: float
    seconds: float
    close_s: float | None

    @property
    def gap(self) -> float:
        return gap(self.found, self.bound)


def gap(found: float, bound: float) -> float:
    return found / bound - 1 if bound > 0 else math.inf if found > 0 else 0.0


def timed_bound(
    trace: exflow.Trace, gpus: int, load: float | None, limit_s: float, found: float
) -> tuple[float, float, float | None]:
    """(bound, seconds, seconds until it was near what was found): the bound is asked for once, and what was proved on
    the way is read off its own checks."""
    counts, start, close = exflow.transitions(trace), perf_counter(), []
    check = sdp.dual_bound

    def watched(*args):
        kept = check(*args)
        if not close and gap(found, 1 - kept * counts.max() / counts.sum()) <= CLOSE:
            close.append(perf_counter() - start)
        return kept

    sdp.dual_bound = watched  # which gets counts over their maximum
    try:
        bound = exflow.lower_bound(counts, gpus, limit_s, max_load=load)
    finally:
        sdp.dual_bound = check
    seconds = perf_counter() - start
    return bound, seconds, close[0] if close else seconds if gap(found, bound) <= CLOSE else None


def rows(name: str, gpus: int, search_s: float, bound_s: float, variants: bool) -> Iterator[Row]:
    """The plain problem; of `variants` also with a limit on load, then with redundant slots."""
    trace = exflow.load_trace(paths.data(f"{name}.npz")).top(1)
    counts = exflow.transitions(trace)
    least = float(LOAD * balance.least_max_load(loads(counts), gpus).max())
    for load in (None, least) if variants else (None,):
        placement = exflow.place(counts, gpus, time_limit_s=search_s, max_load=load)
        found = exflow.evaluate(placement, counts).crossing_fraction
        quick = exflow.lower_bound(counts, gpus, max_load=load)
        yield Row(name, gpus, load, 0, found, quick, *timed_bound(trace, gpus, load, bound_s, found))
        if load is None:
            plain = placement
    if variants and 1 < gpus < trace.num_experts:
        yield evened(name, gpus, counts, search_s, bound_s)
    for extra in SLOTS if variants else ():
        if (held := trace.num_experts // gpus + extra) < trace.num_experts:
            placed = exflow.place_copies(trace, gpus, extra_slots=extra, start=plain, time_limit_s=search_s)
            found = exflow.evaluate_replicas(placed, trace).hops_per_token / len(counts)
            start = perf_counter()
            bound = exflow.replicated_bound(counts, gpus, held, bound_s)
            seconds = perf_counter() - start
            yield Row(
                name, gpus, None, extra, found, 0.0, bound, seconds, seconds if gap(found, bound) <= CLOSE else None
            )


def evened(name: str, gpus: int, counts: np.ndarray, search_s: float, bound_s: float) -> Row:
    """Placements whose busiest GPU gets in each layer as little as `least_max_load` finds."""
    placement = exflow.place(counts, gpus, time_limit_s=search_s, max_load=1.0, where_possible=True)
    found, tokens = exflow.evaluate(placement, counts).crossing_fraction, loads(counts)
    most = balance.least_max_load(tokens, gpus) * tokens.sum(axis=1) / gpus * (1 + ROUNDING)
    start = perf_counter()
    kept = sdp.kept_bound(counts, gpus, lambda: bound_s - (perf_counter() - start), (tokens, most))
    bound, seconds = max(0.0, 1 - kept / counts.sum()), perf_counter() - start
    return Row(name, gpus, "least", 0, found, 0.0, bound, seconds, seconds if gap(found, bound) <= CLOSE else None)


def table(found: list[Row]) -> Table:
    columns = ("routing", "GPUs", "load", "slots", "found", "quick", "gap", "bound", "gap", "s", "s to 15%")
    shown = Table(*columns)
    for row in found:
        shown.add_row(
            row.routing,
            str(row.gpus),
            f"{row.load:.3g}" if isinstance(row.load, float) else row.load or "",
            str(row.slots or ""),
            f"{row.found:.4f}",
            *(
                ("", "")
                if row.slots or row.load == "least"
                else (f"{row.quick:.4f}", f"{gap(row.found, row.quick):.1%}")
            ),
            f"{row.bound:.4f}",
            f"{row.gap:.1%}",
            f"{row.seconds:.1f}",
            "" if row.close_s is None else f"{row.close_s:.1f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--search-seconds", type=float, default=10.0)
    parser.add_argument("--bound-seconds", type=float, default=50.0)
    parser.add_argument("--routings", nargs="+", default=[""], help="parts of names of routings")
    parser.add_argument("--gpus", type=int, nargs="+", help="default: 2 to 16, as far as the experts divide")
    parser.add_argument("--variants", action="store_true", help="also a limit on load, and redundant slots")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    chosen = [
        (name, gpus)
        for name, sizes in ROUTINGS
        for gpus in sizes
        if any(part in name for part in options.routings) and (options.gpus is None or gpus in options.gpus)
    ]
    if not chosen:
        raise SystemExit(f"no routing matches; known: {', '.join(name for name, _ in ROUTINGS)}")
    found = []
    for name, gpus in track(chosen, transient=True):
        found += rows(name, gpus, options.search_seconds, options.bound_seconds, options.variants)
    Console(width=130).print(table(found))
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*Row.__dataclass_fields__, "gap"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) | {"gap": row.gap} for row in found)


if __name__ == "__main__":
    if os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # read when NumPy is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    main()
