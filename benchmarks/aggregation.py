"""ExFlow's integer program as published, and aggregated: `python benchmarks/aggregation.py`.

The published program has a variable for every token and transition, ours (`repro.exflow.paper`) one for every pair of
experts, weighted by the tokens that take it: the same optimum. Both halve the same Mixtral-shaped routing (8 experts
into 2 parts) in HiGHS with equal options.

    rows, columns  of the matrix; `x entries`: how many times more entries the published one has
    crossing       of the best solution found, and the bound that the solver has proven
    s              of the solver; building the matrix is not counted. A time at the limit is no solution time
    x s            published time over aggregated time; a lower bound (>) where the published program ran into the limit
    s to equal     of the aggregated program, until it has a solution no worse than the published program's best
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
from kept import keep
from placement_solvers import published, synthetic
from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro import exflow
from repro.exflow.paper import program


def measured(trace: exflow.Trace, limit_s: float) -> list[dict]:
    """A row for the published program and one for the aggregated one."""
    programs = {"published": published.per_token_program(trace, 2)}
    programs["aggregated"] = program(exflow.transitions(trace), 2)
    steps, rows = trace.tokens * (trace.layers - 1), []
    for name, built in programs.items():
        solved = published.solve(built, limit_s)
        rows.append(
            {
                "layers": trace.layers,
                "tokens": trace.tokens,
                "program": name,
                "rows": built.matrix.shape[0],
                "columns": built.matrix.shape[1],
                "entries": built.matrix.nnz,
                "crossing": None if solved.objective is None else solved.objective / steps,
                "bound": solved.bound / steps,
                "s": solved.seconds,
                "at most s": limit_s,
                "optimal": solved.optimal,
                "s to equal": None,
            }
        )
    best = rows[0]["crossing"]
    if best is not None:
        rows[1]["s to equal"] = published.solve(programs["aggregated"], limit_s, best * steps).seconds
    return rows


def slower(per_token: dict, aggregated: dict) -> str:
    """Ratio of the two times, if it says anything."""
    if not aggregated["optimal"]:
        return "neither" if not per_token["optimal"] else "?"
    return f"{'' if per_token['optimal'] else '> '}{per_token['s'] / aggregated['s']:.0f}"


def cells(row: dict) -> list[str]:
    """A row as it is printed, but for its two ratios."""
    crossing = "none found" if row["crossing"] is None else f"{row['crossing']:.4f}"
    equal = "" if row["s to equal"] is None else f"{row['s to equal']:.2f}"
    shape = [f"{row[key]:,}" for key in ("tokens", "rows", "columns")]
    told = [crossing, f"{row['bound']:.4f}", f"{row['s']:.2f}", "yes" if row["optimal"] else "", equal]
    return [str(row["layers"]), row["program"], *shape, *told]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 4, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 5000])
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of each program")
    parser.add_argument("--csv", type=Path, help="add the rows of each instance to this file as soon as they are there")
    options = parser.parse_args()
    trace = synthetic.markov(max(options.layers), 8, max(options.tokens), alpha=1.0, seed=1)
    heads = ("layers", "program", "tokens", "rows", "columns", "crossing", "bound", "s", "optimal", "s to equal")
    shown = Table(*heads, "x entries", "x s", title=f"8 experts into 2 parts, at most {options.seconds:g} s")
    instances = list(itertools.product(options.layers, options.tokens))
    for layers, tokens in track(instances, transient=True):
        part = exflow.Trace(np.ascontiguousarray(trace.experts[:tokens, :layers]), 8)
        per_token, aggregated = both = measured(part, options.seconds)
        if options.csv:
            keep(options.csv, both)
        shown.add_row(*cells(per_token), f"{per_token['entries'] / aggregated['entries']:.0f}", slower(*both))
        shown.add_row(*cells(aggregated))
    Console(width=130).print(shown)


if __name__ == "__main__":
    main()
