"""What would have to be true for the four numbers of arXiv 2501.04266: 20 billion parameters on 384 GCDs of Frontier.

    explain()     from our setting to the paper's numbers: every change alone, and one after the other
    sample()      draws from wide priors of everything at once, with the numbers that each gives
    sets()        by value of every choice, how often it gives all four
    joint()       which combinations of choices give all four most often

Nothing is fitted: the path of `explain` was chosen because it ends near the paper, and says no more than that there is
one. How many others there are, `sample` says.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from repro.models.gpt import GPTConfig
from repro.scaling.assumptions import PRIORS, Assumptions, Prior, Span, drawn
from repro.scaling.machines import hardware
from repro.scaling.network import Value
from repro.scaling.whatif import predict

NODES, BASE_NODES = 48, 2  # of one node the hierarchical plan would need 66 GB a GCD, of 64
SEQ_LEN = 2048


@dataclass(frozen=True)
class Target:
    """A number of the paper, and how far from it counts as reached: relative, or absolute."""

    value: float
    tolerance: float
    relative: bool = True

    def reached(self, found: Value) -> NDArray[np.bool_]:
        unit = self.value if self.relative else 1.0
        return np.asarray(np.abs(np.asarray(found) - self.value) <= self.tolerance * unit)


# Values and tolerances are those of the claims ZT-1 and ZT-2 (a test compares them).
TARGETS = {
    "hierarchical_over_zeropp": Target(1.71, 0.15),
    "zeropp_over_zero3": Target(1.405, 0.15),
    "hierarchical_over_zero3": Target(2.398, 0.15),
    "efficiency": Target(0.94, 0.05, relative=False),
}


@dataclass(frozen=True, eq=False)
class Setting:
    """How the paper's run may have been made. `tokens`: of a GCD and micro-batch, one sequence or several of `SEQ_LEN`;
    `fixed`: parameters of the machine, as of `Hardware.at`, the others at their likely values. ValueError for other
    tokens."""

    hardware: str = "frontier"
    tokens: int = SEQ_LEN
    accumulation: int = 1
    assumed: Assumptions = field(default_factory=Assumptions)
    fixed: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.tokens > SEQ_LEN and self.tokens % SEQ_LEN):
            raise ValueError(f"tokens is {self.tokens}, allowed: 1 to {SEQ_LEN}, and multiples of {SEQ_LEN}")

    def numbers(self) -> dict[str, Value]:
        """The numbers of `TARGETS`; [draws] where something is. Efficiency is against `BASE_NODES`."""
        seq_len = min(self.tokens, SEQ_LEN)
        config = GPTConfig(44, 6144, 64, seq_len, vocab=50432, checkpointing=True)  # GPT-NeoX-20B's shape [INF]
        machine = hardware(self.hardware).at(**self.fixed)

        def seconds(plan: str, nodes: int = NODES) -> Value:
            batch = {"micro_batch": self.tokens // seq_len, "accumulation": self.accumulation}
            return predict(plan, config, machine, nodes, draws=0, assumed=self.assumed, **batch).seconds

        zero3, zeropp, hierarchical = (seconds(plan) for plan in ("zero3", "zeropp", "hierarchical"))
        return {
            "hierarchical_over_zeropp": zeropp / hierarchical,
            "zeropp_over_zero3": zero3 / zeropp,
            "hierarchical_over_zero3": zero3 / hierarchical,
            "efficiency": seconds("hierarchical", BASE_NODES) / hierarchical,
        }


# --- one change at a time ------------------------------------------------------------------------------------------

Change = Callable[[Setting], Setting]


def _machine(**fixed: float) -> Change:
    return lambda setting: replace(setting, fixed={**setting.fixed, **fixed})


def _engine(**assumed: Any) -> Change:
    return lambda setting: replace(setting, assumed=replace(setting.assumed, **assumed))


def _run(**values: Any) -> Change:
    return lambda setting: replace(setting, **values)


CHANGES: dict[str, Change] = {
    "one slow ring": _run(hardware="frontier-rccl"),
    "no overlap": _machine(overlap=0.0),
    "all compute overlaps": _machine(overlap=1.0),
    "4 micro-batches": _run(accumulation=4),
    "16 micro-batches": _run(accumulation=16),
    "hpZ's copy refilled per micro-batch": _engine(secondary="micro_batch"),
    "no hpZ": _engine(secondary="never"),
    "end of the step exposed": _engine(end_overlap=0.0),
    "scales apart": _engine(scales_apart=1.0),
    "6 messages a layer": _engine(messages=6.0),
    "all-to-all at 35 %": _engine(all_to_all=0.35),
    "quantising 6 times slower": _engine(quantize_slowdown=6.0),
    "1536 tokens": _run(tokens=1536),
    "NICs at 30 %": _machine(**{"cluster achieved": 0.3}),
    "links in the node at 30 %": _machine(**{"node achieved": 0.3}),
}
PATH = (
    *("one slow ring", "no overlap", "4 micro-batches", "hpZ's copy refilled per micro-batch", "no hpZ"),
    *("scales apart", "all-to-all at 35 %", "1536 tokens"),
)
START = "our setting"


def explain(start: Setting | None = None) -> pd.DataFrame:
    """A row per scenario: `kind` single (one change of `CHANGES`) or cumulative (`PATH`, each on top of those before),
    the `change`, the four numbers, and for each whether it is the paper's: `reached_NAME`, and `reached` for all."""
    setting = start or Setting()
    rows = [("cumulative", START, setting)]
    rows += [("single", name, change(setting)) for name, change in CHANGES.items()]
    for name in PATH:
        setting = CHANGES[name](setting)
        rows.append(("cumulative", name, setting))
    table = pd.DataFrame({"kind": kind, "change": name} | setting.numbers() for kind, name, setting in rows)
    return judged(table)


def judged(table: pd.DataFrame) -> pd.DataFrame:
    """With `reached_NAME` for each of the four numbers, and `reached` where all are."""
    each = {f"reached_{name}": target.reached(table[name].to_numpy()) for name, target in TARGETS.items()}
    return table.assign(**each, reached=np.logical_and.reduce(list(each.values())))


# --- everything at once --------------------------------------------------------------------------------------------

# Spans have no likely value: in them what cannot be excluded counts as much as what is likely. Those of the engine end
# where the bands' intervals do, and its choices keep their shares; those of the machine are as wide or wider.
ENGINE_PRIORS: dict[str, Prior] = PRIORS | {
    "messages": Span(1, 6),
    "all_to_all": Span(0.1, 1),
    "quantize_slowdown": Span(1, 20),
}
MACHINE_PRIORS: dict[str, Prior] = {
    "overlap": Span(0, 1, log=False),
    "gemm": Span(0.38, 0.65),
    "package achieved": Span(0.5, 0.85),
    "node achieved": Span(0.3, 1.3),
    "cluster achieved": Span(0.1, 0.92),
    "cluster latency_s": Span(4e-6, 100e-6),
}
# As many draws of each combination.
RUNS: dict[str, tuple[Any, ...]] = {
    "hardware": ("frontier", "frontier-rccl"),  # four rings, or one
    "tokens": (1024, 2048, 4096, 8192),
    "accumulation": (1, 4, 16),
}
CHOICES = ("hardware", "tokens", "accumulation", "secondary", "end_overlap", "scales_apart")
# Those that matter most, by `sets`. A combination of them has 500 draws or more of 48,000; of all six, 125.
JOINT = ("hardware", "tokens", "accumulation", "secondary")


def priors() -> str:
    """All priors in words."""
    each = [f"{name}: {prior}" for name, prior in (ENGINE_PRIORS | MACHINE_PRIORS).items()]
    return "; ".join([*each, *(f"{name}: {', '.join(map(str, values))}, evenly" for name, values in RUNS.items())])


def sample(draws: int = 2000, seed: int = 0) -> pd.DataFrame:
    """A row per draw: `draws` of every combination of `RUNS`; what was drawn, the four numbers, and `reached*`."""
    parts = []
    for number, values in enumerate(itertools.product(*RUNS.values())):
        run = dict(zip(RUNS, values, strict=True))
        own_seed = seed * 1000 + number  # no two combinations of the same draws
        engine, machine = drawn(ENGINE_PRIORS, draws, own_seed), drawn(MACHINE_PRIORS, draws, own_seed)
        found = Setting(assumed=Assumptions(**engine), fixed=machine, **run).numbers()
        parts.append(pd.DataFrame(run | engine | machine | found))
    return judged(pd.concat(parts, ignore_index=True))


def shares(sampled: pd.DataFrame) -> dict[str, float]:
    """Share of the draws that reach each number, and `all`; `all_1`, `all_4`, …: of those with so many micro-batches."""
    found = {name: float(sampled[f"reached_{name}"].mean()) for name in TARGETS}
    by_count = sampled.groupby("accumulation").reached.mean()
    return found | {"all": float(sampled.reached.mean())} | {f"all_{n}": float(v) for n, v in by_count.items()}


def sets(sampled: pd.DataFrame) -> pd.DataFrame:
    """By value of every choice (`choice`, `value`): the share of its draws that reach all four numbers (`share`), and the
    share of all that do which have this value (`of_reached`)."""
    rows = []
    for choice in CHOICES:
        for value, some in sampled.groupby(choice):
            hits = some.reached.sum()
            rows.append((choice, str(value), some.reached.mean(), hits / max(sampled.reached.sum(), 1)))
    return pd.DataFrame(rows, columns=["choice", "value", "share", "of_reached"])


def joint(sampled: pd.DataFrame, most: int = 12) -> pd.DataFrame:
    """The `most` combinations of `JOINT` that give all four numbers in the largest share of their draws (`share`), the
    largest first; and their share of all draws that do (`of_reached`)."""
    found = sampled.groupby(list(JOINT)).reached.agg(share="mean", hits="sum").reset_index()
    found = found.assign(of_reached=found.hits / max(found.hits.sum(), 1))
    return found.nlargest(most, "share")[[*JOINT, "share", "of_reached"]]
