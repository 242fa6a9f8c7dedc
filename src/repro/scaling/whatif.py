"""What if: predictions over machines, sizes, models and plans.

scaling.sweep(["frontier", "dgx-h100"], [1, 8, 48], [scaling.gpt(20e9)], ["zero3", "zeropp", "hierarchical"])
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from repro import zero
from repro.models.gpt import GPTConfig
from repro.scaling.assumptions import PRIORS, Assumptions
from repro.scaling.machines import Hardware, Machine, hardware
from repro.scaling.network import Value
from repro.scaling.step import OURS, Step, activations, layout_of, predict_step
from repro.topology import Topology
from repro.zero import Plan, memory
from repro.zero.layout import Layout
from repro.zero.plan import named
from repro.zero.plan_search import Candidate

DRAWS = 256
BAND, ENDS = (0.025, 0.5, 0.975), ("_low", "", "_high")
TIE = 1.01


def gpt(parameters: float, seq_len: int = 2048, vocab: int = 50432) -> GPTConfig:
    """A GPT of about so many parameters, with checkpointing, heads 128 wide, and a hidden size near 128 times its
    number of layers (as GPT-3's sizes are). ValueError for no parameters."""
    if not 0 < parameters < math.inf:
        raise ValueError(f"parameters is {parameters}, allowed: above 0, and finite")
    layers = max(2, round((parameters / (12 * 128**2)) ** (1 / 3)))
    wanted = math.sqrt(max(parameters - 2 * vocab * 128 * layers, parameters / 3) / (12 * layers))
    hidden = max(128, 128 * round(wanted / 128))
    return GPTConfig(layers, hidden, hidden // 128, seq_len, vocab, checkpointing=True)


def predict(
    which: str | Callable[[Topology], Plan],
    config: GPTConfig,
    machine: Hardware,
    nodes: int,
    *,
    micro_batch: int = 1,
    accumulation: int = 1,
    draws: int = DRAWS,
    seed: int = 0,
    assumed: Assumptions = OURS,
    gradient_bytes: int = 2,
) -> Step:
    """A step of the named plan, or of the one that `which` makes for the machine's levels, in `draws` of the machine's
    parameters (0: at their likely values), by an engine as assumed (of one value, or `Assumptions.drawn(draws, seed)`,
    whose bands include what is not known of it). `gradient_bytes`: as of `predict_step`."""
    topology = machine.topology(nodes)
    chosen = named(which, topology) if isinstance(which, str) else which(topology)
    drawn = machine.machine(nodes, draws, seed)
    return predict_step(chosen, config, drawn, micro_batch, accumulation, None, assumed, gradient_bytes)


def sweep(
    machines: Iterable[Hardware | str],
    nodes: Iterable[int],
    models: Iterable[GPTConfig],
    plans: Iterable[str],
    accumulations: Iterable[int] = (1,),
    **options: Any,
) -> pd.DataFrame:
    """A row per combination: the median (no suffix) and the ends of the 95 % band (`_low`, `_high`) of step seconds and
    of TFLOPS per rank, memory, and what the step waits for. Modelled, all of it. `options`: as of `predict`."""
    rows = []
    for machine, count, config, accumulation, plan in itertools.product(machines, nodes, models, accumulations, plans):
        kind = hardware(machine) if isinstance(machine, str) else machine
        found = predict(plan, config, kind, count, accumulation=accumulation, **options)
        rows.append(
            {
                "hardware": kind.name,
                "nodes": count,
                "ranks": kind.topology(count).world_size,
                "parameters": config.parameters,
                "accumulation": accumulation,
                "plan": plan,
                **bands({"seconds": found.seconds, "tflops": found.tflops_per_rank}),
                "gigabytes": found.rank_bytes / 1e9,
                "fits": found.fits,
                "critical": found.critical,
            }
        )
    return pd.DataFrame(rows)


def bands(values: Mapping[str, Value]) -> dict[str, float]:
    """`name`_low, `name` and `name`_high of every value: quantiles of the draws."""
    quantiles = {name: np.quantile(value, BAND) for name, value in values.items()}
    return {name + end: float(q) for name, three in quantiles.items() for end, q in zip(ENDS, three, strict=True)}


def sensitivity(kind: Hardware, result: Callable[[Hardware, Assumptions], float]) -> pd.DataFrame:
    """What decides `result`, a prediction without draws: each uncertain parameter of the machine at its low and its high
    end, and each assumption about the engine at the ends of its prior, the others likely. The widest swing first."""
    likely = result(kind, OURS)
    rows = []
    for name, interval in kind.intervals().items():
        ends = [result(kind.at(**{name: value}), OURS) for value in (interval.low, interval.high)]
        rows.append((name, *ends))
    for name, prior in PRIORS.items():
        changes: list[dict[str, Any]] = [{name: value} for value in prior.ends]
        rows.append((name, *(result(kind, replace(OURS, **change)) for change in changes)))
    table = pd.DataFrame(rows, columns=["parameter", "at_low", "at_high"])
    swing = (table.at_high - table.at_low).abs()
    return table.assign(likely=likely, swing=swing).sort_values("swing", ascending=False, ignore_index=True)


def search(
    config: GPTConfig,
    machine: Machine,
    *,
    micro_batch: int = 1,
    accumulation: int = 1,
    compute_s: Value | None = None,
    plans: Iterable[Plan] | None = None,
    gradient_bytes: int = 2,
) -> list[Candidate]:
    """`repro.zero.search` with the cost of `predict_step`: messages hide behind compute. Where the machine is drawn,
    plans are ranked by the median. `compute_s`: of forwards and backwards, where it was measured. `gradient_bytes`: as of
    `predict_step`. ValueError where no plan fits the machine's memory."""

    def cost(plan: Plan, model: Layout, micro_batches: int) -> float:
        return float(np.median(predict_step(plan, config, machine, micro_batch, micro_batches, compute_s).seconds))

    return zero.search(
        layout_of(config),
        machine.topology,
        machine.memory_bytes,
        micro_batches=accumulation,
        cost=cost,
        activations=activations(config, micro_batch),
        gradient_bytes=gradient_bytes,
        plans=plans,
    )


def best_plan(table: pd.DataFrame) -> pd.DataFrame:
    """Of a `sweep`, the best plan that fits for each machine, size, model and accumulation: `plan`, or "none fits". Of
    plans as fast to 1 %, because their messages hide behind compute, it is the one that needs least memory."""
    keys = ["hardware", "nodes", "ranks", "parameters", "accumulation"]
    fitting = table[table.fits]
    fastest = fitting.groupby(keys).seconds.transform("min")
    close = fitting[fitting.seconds <= TIE * fastest].sort_values("gigabytes").drop_duplicates(keys)
    found = table[keys].drop_duplicates().merge(close, on=keys, how="left")
    return found.assign(plan=found.plan.fillna("none fits"))


def crossover(
    faster: str,
    slower: str,
    config: GPTConfig,
    machine_at: Callable[[float], Hardware],
    low: float,
    high: float,
    nodes: int,
    **options: Any,
) -> float | None:
    """The value (to 1 %) between `low` and `high` at which `faster` stops being so, of whatever `machine_at` varies.
    None when the order is the same at both ends. At the likely values. ValueError unless 0 < low < high."""
    if not 0 < low < high:
        raise ValueError(f"low is {low!r} and high {high!r}, allowed: 0 < low < high")

    def gain(value: float) -> float:
        machine = machine_at(value)
        ours, theirs = (predict(name, config, machine, nodes, draws=0, **options).seconds for name in (faster, slower))
        return float(theirs - ours)

    begins = gain(low) > 0
    if begins == (gain(high) > 0):
        return None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if (gain(middle) > 0) == begins else (low, middle)
    return math.sqrt(low * high)


def largest_model(name: str, kind: Hardware, nodes: int) -> float:
    """Parameters whose states (16-bit weights and gradients, Adam in fp32) fill a rank's memory, without activations:
    the ceiling of a plan, by `repro.zero.memory.formula`."""
    chosen = named(name, kind.topology(nodes))
    return kind.memory_bytes / sum(memory.formula(chosen, 10**9).values()) * 1e9


def with_network(kind: Hardware, factor: float) -> Hardware:
    """The same machine with its outermost links `factor` times as fast."""
    *inside, outside = kind.tiers
    return replace(kind, tiers=(*inside, replace(outside, bytes_per_s=factor * outside.bytes_per_s)))
