"""Expert placements against those of other methods at equal time: `python benchmarks/placement.py` (extra `benchmark`).

Instances are a real trace (gpt-oss-20b, sequences held out) and traces of known processes (held-out tokens of the same
process). Every method gets the same transition counts, seed, seconds and one thread. Columns:

    held-out   share of transitions of unseen tokens that change GPU; `node` the share that changes node
    placed by  the same on the tokens that the placement was computed from: what all methods minimise. On several nodes
               they minimise `cost`, hops per transition with 1 inside a node and 2 between nodes; peers then place on
               nodes first, as ExFlow does
    gap        (cost - proven lower bound) / cost, on the tokens placed by: no placement is better by more. On one node,
               cost is `placed by`
    load       tokens on the busiest GPU over the even share, mean over layers, held-out tokens
    s          wall time of the call; more than the limit where a method cannot be interrupted
    optimal    proven: by the method, or because it meets the bound

Methods that cannot be run on an instance are listed with the reason. The last lines say where ours is worse than a
peer, and which methods took more than their time.
"""

import argparse
import csv
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import placement_serving
from placement_instances import Instance, drawn, instances
from placement_solvers import cp_sat, synthetic
from placement_solvers.partitioners import PARTITIONERS, staged
from placement_solvers.published import exact_bisection
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from repro import exflow

INTRA_COST, INTER_COST = 1.0, 2.0  # of a hop, as `exflow.place` and the published solver weigh them
OURS = "affinity"
HALVED = "exflow-halved"  # ExFlow's recursive halving with every half proven optimal, where E is small enough
FREE = ("contiguous", "random", "load", HALVED)  # take the time they need, so one run serves all limits
METHODS = (*FREE, "exflow", "exflow-direct", "alternating", "annealing", "METIS", "METIS-unbalanced", "CP-SAT", OURS)
LARGEST_PROGRAM = 6_000_000  # rows of the first stage that HiGHS gets: more take longer to build than all limits here
LATE = 1.2  # times its limit that a method may take unmentioned
SAME = 1e-9  # relative difference of costs that is a matter of rounding


@dataclass(frozen=True)
class Row:
    """What one method reached on one instance; all but `reason` are None where it could not be run."""

    instance: str
    method: str
    limit_s: float
    held_out: float | None = None
    held_out_node: float | None = None
    placed_by: float | None = None
    placed_by_node: float | None = None
    cost: float | None = None
    held_out_cost: float | None = None
    gap: float | None = None
    load: float | None = None
    seconds: float | None = None
    optimal: bool | None = None
    reason: str = ""


def place(instance: Instance, counts: np.ndarray, method: str, limit_s: float) -> tuple[np.ndarray, bool]:
    """(GPU of every expert, whether the method proves that no placement is better); raises what a method raises."""
    if method in exflow.METHODS:
        if method.startswith("exflow") and (rows := first_rows(instance, counts, method)) > LARGEST_PROGRAM:
            raise cp_sat.TooLarge(f"the program would have {rows:,} rows, allowed here: {LARGEST_PROGRAM:,}")
        found = exflow.place(counts, instance.gpus, instance.gpus_per_node, method, time_limit_s=limit_s)
        return found.gpu, found.optimal
    if method == HALVED:
        try:
            return exact_bisection(counts, instance.gpus), False
        except ValueError as error:
            raise cp_sat.TooLarge(str(error)) from error
    partitioner = PARTITIONERS[method]
    return staged(partitioner, counts, instance.gpus, instance.gpus_per_node, 0, limit_s), False


def first_rows(instance: Instance, counts: np.ndarray, method: str) -> int:
    """Rows R ≥ ±(x_a - x_b) of the first program of `method`: two for each pair of experts and, beyond two, part."""
    parts = 2 if method == "exflow" else instance.nodes if instance.nodes > 1 else instance.gpus
    return 2 * int(np.count_nonzero(counts)) * (parts if parts > 2 else 1)


def cost_bound(counts: np.ndarray, gpus: int, nodes: int, time_limit_s: float) -> float:
    """Cost per token and layer transition that no placement on `gpus` GPUs in `nodes` nodes can beat.

    A hop costs INTRA_COST, and what INTER_COST is above that if it leaves its node: hops between GPUs and hops between
    nodes are bounded each by itself.
    """
    if nodes == 1:
        return INTRA_COST * exflow.lower_bound(counts, gpus, time_limit_s)
    all_hops, between = (exflow.lower_bound(counts, units, time_limit_s / 2) for units in (gpus, nodes))
    return INTRA_COST * all_hops + (INTER_COST - INTRA_COST) * between


class Bench:
    """Rows of one instance: draws its tokens and computes its bound, in about `bound_s` seconds, once."""

    def __init__(self, instance: Instance, bound_s: float) -> None:
        self.instance = instance
        train, held_out = instance.draw()
        self.counts, self.held_out = exflow.transitions(train), exflow.transitions(held_out)
        self.bound = cost_bound(self.counts, instance.gpus, instance.nodes, bound_s)

    def run(self, method: str, limit_s: float) -> Row:
        start = perf_counter()
        try:
            gpu, proven = place(self.instance, self.counts, method, limit_s)
        except ImportError as error:
            return Row(self.instance.name, method, limit_s, reason=f"not installed: {error}")
        except cp_sat.TooLarge as error:
            return Row(self.instance.name, method, limit_s, reason=str(error))
        seconds = perf_counter() - start
        placement = exflow.Placement(gpu, self.instance.gpus, self.instance.gpus_per_node, method)
        ours, unseen = (exflow.evaluate(placement, counts) for counts in (self.counts, self.held_out))
        steps = len(self.counts)
        gap = exflow.gap(ours.weighted_hops / steps, self.bound)
        return Row(
            self.instance.name,
            method,
            limit_s,
            held_out=unseen.crossing_fraction,
            held_out_node=unseen.node_crossing_fraction,
            placed_by=ours.crossing_fraction,
            placed_by_node=ours.node_crossing_fraction,
            cost=ours.weighted_hops / steps,
            held_out_cost=unseen.weighted_hops / steps,
            gap=gap,
            load=unseen.max_load,
            seconds=seconds,
            optimal=bool(proven or gap < SAME),
        )


def warm_up(methods: list[str]) -> None:
    """Imports and compilation are nobody's time: every method once on a tiny instance."""
    tiny = Instance("tiny", drawn(synthetic.markov, 3, 8, 100), 2)
    bench = Bench(tiny, 0.0)
    for method in methods:
        bench.run(method, 0.1)


def measure(
    chosen: list[Instance], methods: list[str], limits: list[float], bound_s: float, progress: Progress
) -> list[Row]:
    """All rows; a method that needs no time is run once per instance."""
    rows: list[Row] = []
    runs = [(method, limit) for limit in limits for method in methods if method not in FREE or limit == limits[0]]
    task = progress.add_task("compiling", total=len(chosen) * len(runs))
    warm_up(methods)
    for instance in chosen:
        progress.update(task, description=f"{instance.name}: drawing tokens, bound")
        bench = Bench(instance, bound_s)
        mine = []
        for method, limit in runs:
            progress.update(task, description=f"{instance.name}: {method}, {limit:g} s")
            mine.append(bench.run(method, limit))
            progress.advance(task)
        progress.console.print(table(instance, mine, bench.bound))
        rows += mine
    return rows


def table(instance: Instance, rows: list[Row], bound: float) -> Table:
    several = instance.nodes > 1
    columns = ["limit s", "method", "held-out", *["node"] * several, "placed by", *["node", "cost"] * several]
    reasons = {f"{row.method} was not run: {row.reason}": None for row in rows if row.reason}  # in order, once each
    titles = {"title": f"{instance.name} (bound {bound:.4f})", "caption": "\n".join(reasons), "caption_justify": "left"}
    shown = Table(*columns, "gap", "load", "s", "optimal", **titles)
    for row in rows:
        limit = "" if row.method in FREE else f"{row.limit_s:g}"
        if row.seconds is None:
            shown.add_row(limit, row.method, "not run")
            continue
        shown.add_row(
            limit,
            row.method,
            f"{row.held_out:.4f}",
            *[f"{row.held_out_node:.4f}"] * several,
            f"{row.placed_by:.4f}",
            *([f"{row.placed_by_node:.4f}", f"{row.cost:.4f}"] if several else []),
            f"{row.gap:.1%}",
            f"{row.load:.3f}",
            f"{row.seconds:.2f}",
            "yes" if row.optimal else "",
        )
    return shown


def verdicts(rows: list[Row]) -> list[str]:
    """On tokens placed by and held-out tokens: is ours ever worse than a peer in equal time, who overran?"""
    if all(row.seconds is None or row.method != OURS for row in rows):
        return [f"{OURS} was not run, so there is nothing to compare"]
    lines = []
    for what, field in (("tokens placed by", "cost"), ("held-out tokens", "held_out_cost")):
        worse = [
            f"{row.instance} {row.limit_s:g} s: {getattr(ours, field):.4f}, {row.method} {getattr(row, field):.4f}"
            for ours in rows
            if ours.method == OURS and ours.seconds is not None
            for row in rows
            if row.method != OURS
            and row.seconds is not None
            and row.instance == ours.instance
            and (row.limit_s == ours.limit_s or row.method in FREE)
            and getattr(row, field) < getattr(ours, field) * (1.0 - SAME)
        ]
        told = "yes" if not worse else "no:\n  " + "\n  ".join(worse)
        lines.append(f"{OURS} never worse than any peer at equal time, {what}: {told}")
    late = [
        f"{row.instance} {row.method}: {row.seconds:.1f} of {row.limit_s:g} s"
        for row in rows
        if row.method not in FREE and row.seconds is not None and row.seconds > LATE * row.limit_s
    ]
    return [*lines, "took more than their time:\n  " + "\n  ".join(late)] if late else lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 10.0], help="time limits of every method")
    parser.add_argument("--bound-seconds", type=float, default=5.0, help="for the lower bound of each instance")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--instances", nargs="+", default=[""], help="parts of names of instances; `list` names them")
    parser.add_argument("--quick", action="store_true", help="four instances, 1 s each: about a minute")
    parser.add_argument("--serving", action="store_true", help="placements with copies instead: `placement_serving.py`")
    parser.add_argument("--splits", type=int, nargs="+", default=[0], help="with --serving: seeds of the split")
    parser.add_argument("--figure", type=Path, help="with --serving: draw hops against load into this file (PNG)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if options.serving:
        return placement_serving.main(options.instances, options.splits, options.csv, options.figure)
    console = Console(width=130)
    known = instances()
    if options.instances == ["list"]:
        console.print("\n".join(each.name for each in known))
        return
    chosen = [each for each in known if any(part in each.name for part in options.instances)]
    if options.quick:
        chosen = [each for each in chosen if each.quick]
    if not chosen:
        raise SystemExit(f"no instance matches {', '.join(options.instances)}; --instances list names all")
    with Progress(console=console, transient=True) as progress:
        limits = [1.0] if options.quick else sorted(options.seconds)
        rows = measure(chosen, options.methods, limits, options.bound_seconds, progress)
    console.print(*verdicts(rows), sep="\n", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(Row.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    if (
        os.environ.get("OPENBLAS_NUM_THREADS") != "1"
    ):  # read when NumPy is loaded; else some methods had more cores than others
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    main()
