"""ExFlow (arXiv 2401.08383): measure which expert follows which, and place experts so that tokens stay where they are.

    from repro import exflow
    trace = exflow.load("routing.npz", top_k=1)
    train, held_out = trace.split(0.7, seed=0)
    placement = exflow.place(exflow.transitions(train), gpus=8, gpus_per_node=4)
    print(exflow.evaluate(placement, held_out).hops_per_token)

`recording.record_routing` makes a trace of a live model, `export` writes placements for servers and `permute.permute_experts` reorders
a checkpoint; `recording` and `permute` need torch and are imported by name. Read `placement.py` first.
"""

from repro.exflow.affinity import conditional, measure, mutual_information, shuffled
from repro.exflow.bound import gap, lower_bound
from repro.exflow.command import place_file
from repro.exflow.evaluate import Cost
from repro.exflow.export import FORMATS, physical_to_logical, read_csv, write_csv
from repro.exflow.front import pareto
from repro.exflow.levels import Levels, parse_levels
from repro.exflow.placement import METHODS, Placement, evaluate, place
from repro.exflow.trace import Trace, load, transitions

__all__ = [
    "FORMATS",
    "METHODS",
    "Cost",
    "Levels",
    "Placement",
    "Trace",
    "conditional",
    "evaluate",
    "gap",
    "load",
    "lower_bound",
    "measure",
    "mutual_information",
    "pareto",
    "parse_levels",
    "physical_to_logical",
    "place",
    "place_file",
    "read_csv",
    "shuffled",
    "transitions",
    "write_csv",
]
