"""ExFlow (arXiv 2401.08383): measure which expert follows which, and place experts so that tokens stay where they are.

    from repro import exflow
    trace = exflow.load_trace("routing.npz", top_k=1)
    train, held_out = trace.split(0.7, seed=0)
    placement = exflow.place(exflow.transitions(train), gpus=8, gpus_per_node=4)
    print(exflow.evaluate(placement, held_out).hops_per_token)

`recording.record_routing` makes a trace of a live model, `FORMATS` writes placements for servers,
`permute.permute_experts` reorders a checkpoint and `moe.Decoder` decodes on several ranks. Read `paper.py` first.
"""

from importlib import import_module

try:
    for _package in ("highspy", "pyarrow", "scipy", "threadpoolctl"):
        import_module(_package)
except ImportError as error:
    raise ImportError(
        f"repro.exflow needs {error.name}: pip install 'repro-papers[exflow]'", name=error.name
    ) from error

from repro.exflow.affinity import measure_affinity
from repro.exflow.bound import gap, hop_cost_bound, lower_bound, replicated_bound
from repro.exflow.pareto import serving_front
from repro.exflow.placement import METHODS, Placement, evaluate, place
from repro.exflow.serving.copies import place_copies
from repro.exflow.serving.export import FORMATS, read_csv
from repro.exflow.serving.fanout import fan_out, place_for_fanout
from repro.exflow.serving.fanout.dispatch import dispatch, place_for_dispatch
from repro.exflow.serving.replicas import evaluate_replicas, place_replicas
from repro.exflow.serving.slots import Replicas
from repro.exflow.spread import tokens_needed
from repro.exflow.trace import Trace, transitions
from repro.exflow.trace_files import load_trace

__all__ = [
    "FORMATS",
    "METHODS",
    "Placement",
    "Replicas",
    "Trace",
    "dispatch",
    "evaluate",
    "evaluate_replicas",
    "fan_out",
    "gap",
    "hop_cost_bound",
    "load_trace",
    "lower_bound",
    "measure_affinity",
    "place",
    "place_copies",
    "place_for_dispatch",
    "place_for_fanout",
    "place_replicas",
    "read_csv",
    "replicated_bound",
    "serving_front",
    "tokens_needed",
    "transitions",
]
