"""ExFlow's integer program as published, and aggregated: `python benchmarks/aggregation.py`.

The published program has a variable for every token and transition, ours (`repro.exflow.paper`) one for every pair of
experts, weighted by the tokens that take it: the same optimum. Both halve the same Mixtral-shaped routing (8 experts
into 2 parts) in HiGHS with equal options.

    rows, columns  of the matrix; `x` how many times more entries the published one has
    crossing       of the best solution found, and the bound that the solver has proven
    s              of the solver; building the matrix is not counted. A time at the limit is no solution time
    x              published time over aggregated time; a lower bound (>) where the published program ran into the limit
    s to equal     of the aggregated program, until it has a solution no worse than the published program's best
"""

import argparse

import numpy as np
from placement_solvers import published, synthetic
from rich.console import Console
from rich.progress import track
from rich.table import Table

from repro import exflow
from repro.exflow.highs import Program
from repro.exflow.paper import program


def solved_both(trace: exflow.Trace, limit_s: float) -> list[tuple[Program, published.Solved]]:
    """The published program and the aggregated one, with what HiGHS made of them."""
    programs = published.per_token_program(trace, 2), program(exflow.transitions(trace), 2)
    return [(each, published.solve(each, limit_s)) for each in programs]


def times(solved: list[published.Solved]) -> str:
    """Ratio of the two times, if it says anything."""
    per_token, aggregated = solved
    if not aggregated.optimal:
        return "neither" if not per_token.optimal else "?"
    return f"{'' if per_token.optimal else '> '}{per_token.seconds / aggregated.seconds:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 4, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[500, 2000, 5000])
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of each program")
    options = parser.parse_args()
    trace = synthetic.markov(max(options.layers), 8, max(options.tokens), alpha=1.0, seed=1)
    shown = Table(
        *(
            "layers",
            "tokens",
            "program",
            "rows",
            "columns",
            "x",
            "crossing",
            "bound",
            "s",
            "optimal",
            "x",
            "s to equal",
        ),
        title=f"8 experts into 2 parts, at most {options.seconds:g} s",
    )
    for layers, tokens in track(
        [(layers, tokens) for layers in options.layers for tokens in options.tokens], transient=True
    ):
        part = exflow.Trace(np.ascontiguousarray(trace.experts[:tokens, :layers]), 8)
        both, steps = solved_both(part, options.seconds), tokens * (layers - 1)
        larger = both[0][0].matrix.nnz / both[1][0].matrix.nnz
        ratios = [(f"{larger:.0f}", times([solved for _, solved in both])), ("", "")]
        equal = ["", ""]
        if both[0][1].objective is not None:
            equal[1] = f"{published.solve(both[1][0], options.seconds, both[0][1].objective).seconds:.2f}"
        names = ("published", "aggregated")
        for name, (built, solved), (size, slower), reached in zip(names, both, ratios, equal, strict=True):
            crossing = "none found" if solved.objective is None else f"{solved.objective / steps:.4f}"
            shape = [f"{number:,}" for number in built.matrix.shape]
            end = [
                f"{solved.bound / steps:.4f}",
                f"{solved.seconds:.2f}",
                "yes" if solved.optimal else "",
                slower,
                reached,
            ]
            shown.add_row(str(layers), f"{tokens:,}", name, *shape, size, crossing, *end)
    Console(width=130).print(shown)


if __name__ == "__main__":
    main()
