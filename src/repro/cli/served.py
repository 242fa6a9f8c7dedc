"""What `repro place` does beyond placing once: a front, an update of an old placement, how many tokens to record."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from repro.cli.console import emit, stderr, stdout

if TYPE_CHECKING:  # loading these takes a second, and `repro --help` waits for none
    from repro.exflow import Replicas, Trace
    from repro.exflow.levels import Levels
    from repro.exflow.spread import Needed


def show_front(front: "list[Replicas]", routing: "Trace", dispatch: str, json_: bool) -> None:
    """Hops and load of each placement, the most even first."""
    rows = [numbers(placed, routing, dispatch) for placed in front]
    if json_:
        return emit(rows)
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.4f}" for value in row.values()))
    stdout.print(table)


def show_needed(needed: "Needed") -> None:
    """As JSON; on stderr, whether the time was too short for it to be so."""
    from repro.exflow.spread import SEARCHES

    if needed.searches_cut:
        cut = f"{needed.searches_cut} of {SEARCHES} searches were cut short"
        stderr.print(f"tokens: {cut}, so that these numbers are of worse and unequal placements", soft_wrap=True)
    emit(asdict(needed))


def read_old(path: Path, routing: "Trace", machine: "Levels", dense_layers: int = 0) -> "Replicas":
    """The placement of a file: a CSV as `--out` writes it, or a map of experts by slot, of SGLang (without its first
    `dense_layers`) or vLLM. ValueError names the file and what is wrong; FileNotFoundError when there is none."""
    import numpy as np

    from repro import exflow
    from repro.exflow.serving.slots import physical_to_logical

    per_node = machine.spans[machine.node_level]
    if path.suffix != ".json":
        gpu = exflow.read_csv(path, routing.layers, routing.num_experts, machine.gpus)
        return exflow.Replicas(physical_to_logical(gpu), machine.gpus, per_node)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such placement")
    try:
        found: Any = json.loads(path.read_text())
        sglang = isinstance(found, dict)
        rows = np.array(found["physical_to_logical_map"][dense_layers:] if sglang else found)
        old = exflow.Replicas(rows, machine.gpus, per_node)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no map of experts by slot for {machine.gpus} GPUs: {error}") from error
    if (shape := (len(rows), old.num_experts)) != (expected := (routing.layers, routing.num_experts)):
        raise ValueError(
            f"{path}: {shape[0]} layers of {shape[1]} experts, the trace has {expected[0]} of {expected[1]}"
        )
    return old


def change(old: "Replicas", new: "Replicas", routing: "Trace", dispatch: str) -> dict[str, float]:
    """The numbers of the old placement, and how many experts, all layers together, a GPU holds that did not before."""
    return numbers(old, routing, dispatch, "old_") | {"moved": int((new.hosted & ~old.hosted).sum())}


def numbers(placed: "Replicas", routing: "Trace", dispatch: str, prefix: str = "") -> dict[str, float]:
    """Hops and load of a placement with copies, each name after `prefix`."""
    from repro import exflow

    found = asdict(exflow.evaluate_replicas(placed, routing, dispatch))
    return {prefix + name: value for name, value in found.items()}
