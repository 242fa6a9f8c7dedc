"""ExFlow (arXiv 2401.08383): measure which expert follows which, and place experts so that tokens stay where they are.

    from repro import exflow
    trace = exflow.load("routing.npz", top_k=1)
    train, held_out = trace.split(0.7, seed=0)
    placement = exflow.place(exflow.transitions(train), gpus=8, gpus_per_node=4)
    print(exflow.evaluate(placement, held_out).hops_per_token)

`recording.record_routing` makes a trace of a live model, `export` writes placements for servers, `permute.permute_experts` reorders
a checkpoint and `moe.Decoder` decodes on several ranks; these but `export` need torch and are imported by name. Read
`placement.py` first.
"""

from repro.exflow.affinity import conditional, measure, mutual_information, shuffled
from repro.exflow.bound import gap, lower_bound, lower_bound_cost
from repro.exflow.command import place_file
from repro.exflow.evaluate import Cost
from repro.exflow.front import pareto
from repro.exflow.levels import Levels, parse_levels
from repro.exflow.placement import METHODS, Placement, evaluate, place
from repro.exflow.serving.export import FORMATS, read_csv, write_csv
from repro.exflow.serving.fanout import FanOut, fan_out, place_for_fanout
from repro.exflow.serving.replicas import ReplicaCost, evaluate_replicas, place_replicas
from repro.exflow.serving.slots import Replicas, physical_to_logical, without_copies
from repro.exflow.trace import Trace, load, transitions

__all__ = [
    "FORMATS",
    "METHODS",
    "Cost",
    "FanOut",
    "Levels",
    "Placement",
    "ReplicaCost",
    "Replicas",
    "Trace",
    "conditional",
    "evaluate",
    "evaluate_replicas",
    "fan_out",
    "gap",
    "load",
    "lower_bound",
    "lower_bound_cost",
    "measure",
    "mutual_information",
    "pareto",
    "parse_levels",
    "physical_to_logical",
    "place",
    "place_file",
    "place_for_fanout",
    "place_replicas",
    "read_csv",
    "shuffled",
    "transitions",
    "without_copies",
    "write_csv",
]
