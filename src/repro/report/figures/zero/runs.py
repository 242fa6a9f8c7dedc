"""Runs of `zero_train` as the figures compare them: the setting that most plans ran with, and what differs from it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from repro.experiments.zero_train import EXPERIMENT
from repro.report.figures.data import NothingToShow
from repro.report.figures.marks import span

PLANS = {  # name in the records: name in figures
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "hpz": "ZeRO-3 with hpZ",
    "qwz": "ZeRO-3 with qwZ",
    "qgz": "ZeRO-3 with qgZ",
    "qgz_one_hop": "ZeRO-3 with qgZ in one hop",
    "zeropp": "ZeRO++",
    "mics": "MiCS",
    "hsdp": "HSDP",
    "hfsdp": "HFSDP",
    "hierarchical_fp": "hierarchical, 16 bits",
    "hierarchical": "hierarchical",
    "best": "the search's best",
    "deepspeed_zero3": "DeepSpeed ZeRO-3",
    "deepspeed_zeropp": "DeepSpeed ZeRO++",
    "fsdp2": "FSDP2",
    "fsdp2_reshard": "FSDP2, copy in the node",
    "fsdp2_hsdp": "FSDP2 HSDP",
}
PlanName = Literal[*PLANS]
HPZ = " hpZ: ZeRO++'s second copy of the weights, one in every node."
LEVELS = {"package": "in the package\n(GCD pair)", "node": "between packages\nof a node", "cluster": "between nodes"}
FIELDS = {name: usual for name, usual in EXPERIMENT.defaults.items() if name != "plan"}
MEASURED, PREDICTED, STATE = "step_seconds", "predicted_step_seconds", "state_bytes_per_rank"
OWN = "the machine's own"  # `fabric` of a job on a cluster, where each node is a machine


def commonest(table: pd.DataFrame, *free: str) -> dict[str, Any]:
    """The setting that most plans ran with, whatever the fields in `free`."""
    same = [name for name in FIELDS if name not in free]
    plans = table.groupby(same).plan.nunique()
    return dict(zip(same, plans[::-1].idxmax(), strict=True))


class Training:
    """Finished runs of `zero_train`.

    `runs`: a row per run, with every field and every metric of the experiment (nan: unknown); at least one.
    `setting`: value by field of what most plans ran with, one micro-batch per step where there is a choice.
    `batches`: micro-batches per step to compare: those of the setting, and the number of several that most plans had.
    """

    def __init__(self, runs: pd.DataFrame) -> None:
        unshaped = runs.fabric.astype(str).str.startswith("unshaped")
        self.runs = runs.assign(**{PREDICTED: runs[PREDICTED].mask(unshaped)})  # there no rates are given
        self.setting = commonest(self.runs if unshaped.all() else self.runs[~unshaped], "accumulation", "steps")
        plans = self.like(accumulation=...).groupby("accumulation").plan.nunique()
        self.batches = sorted(plans.index, key=lambda count: (count > 1, -plans[count]))[:2]
        self.setting["accumulation"] = self.batches[0]

    def like(self, setting: dict[str, Any] | None = None, **free: Any) -> pd.DataFrame:
        """Runs of a setting (default: the common one), but named fields have the given value, or any (`...`); of as many
        steps as most runs with so many micro-batches, where none are named."""
        wanted = {name: value for name, value in {**(setting or self.setting), **free}.items() if value is not ...}
        runs = self.runs[np.logical_and.reduce([self.runs[name] == value for name, value in wanted.items()])]
        if "steps" in wanted or "steps" in free or runs.empty:
            return runs
        return runs[runs.steps == runs.groupby("accumulation").steps.transform(lambda steps: steps.mode().max())]

    def with_batches(self, accumulation: int | None) -> pd.DataFrame:
        """Runs of the setting with so many micro-batches per step, default: the fewest; NothingToShow without any."""
        runs = self.like(accumulation=accumulation or self.batches[0])
        if runs.empty:
            counts = ", ".join(map(str, sorted(self.like(accumulation=...).accumulation.unique())))
            raise NothingToShow(f"No run with accumulation {accumulation}; there are runs with {counts}.")
        return runs

    @property
    def evidence(self) -> str:
        """Kind of evidence of the setting's runs."""
        return str(self.like().evidence.iloc[0])

    @property
    def repeats(self) -> str:
        """How many runs stand behind a median, for captions."""
        counts = self.like(accumulation=...).groupby(["plan", "accumulation"]).repeat.nunique()
        if counts.max() == 1:
            return "One run each."
        return f"Marks: medians of {span(counts)} runs, with their range."

    def size(self, setting: dict[str, Any] | None = None) -> str:
        """Ranks and parameters of a setting, for captions."""
        setting = setting or self.setting
        ranks = setting["nodes"] * setting["packages"] * setting["gcds"]
        nodes = {"shaped": "emulated nodes of one machine", OWN: "nodes"}.get(setting["fabric"], "nodes of one machine")
        return f"{ranks} processes in {setting['nodes']} {nodes}, a GPT of {parameters(self.like(setting))}"

    def best(self, runs: pd.DataFrame) -> str:
        """What the search's best plan holds, for captions of figures that show its speed; empty without a run of it."""
        held = (runs[STATE] / runs.parameters)[runs.plan == "best"].median()
        said = f" The search's best is the fastest plan that fits. Here all fit, and it holds {held:.3g} bytes of state per"
        return (
            "" if np.isnan(held) else f"{said} parameter on every rank (DDP: 16); for large models it is another plan."
        )

    def libraries(self, runs: pd.DataFrame) -> str:
        """What the libraries' numbers are of, for captions; empty where none ran, or over GPUs."""
        if self.setting["fabric"] == OWN or not runs.plan.str.startswith(("deepspeed", "fsdp2")).any():
            return ""
        return (
            " DeepSpeed's ZeRO-3 and FSDP2 use gloo's reduce-scatter here, which moves twice the bytes. No library's times "
            "here say anything about it on GPUs."
        )

    @property
    def network(self) -> str:
        """The network of the setting, for captions."""
        fabric = self.setting["fabric"]
        if fabric == "shaped":
            return f"links shaped to {rates(self.setting)}"
        unshaped = fabric.startswith("unshaped")
        return "network NOT shaped: times say nothing about bandwidth" if unshaped else "the machine's own network"


def rates(run: Mapping[str, Any] | pd.Series) -> str:
    """What links are shaped to in a run, inside a package, a node and between nodes, for captions."""
    slow = run["cluster_mbit_s"]
    each = (slow * run["package_ratio"], slow * run["node_ratio"], slow)
    return f"{' : '.join(f'{rate:g}' for rate in each)} Mbit/s per rank"


def present(table: pd.DataFrame, plans: Sequence[str] = tuple(PLANS)) -> list[str]:
    """Those of `plans` that the runs have, in the order of `PLANS`."""
    return [plan for plan in PLANS if plan in plans and plan in set(table.plan)]


def predicted_gain(runs: pd.DataFrame, slow: str, fast: str) -> float:
    """How many times faster plan `fast` is predicted to be than `slow`: the median over repeats (nan: not run)."""
    slower, faster = (runs[runs.plan == plan].groupby("repeat")[PREDICTED].median() for plan in (slow, fast))
    return (slower / faster).median()


def parameters(table: pd.DataFrame) -> str:
    """Size of the trained model, for captions."""
    count = table.parameters.iloc[0]
    return f"{count / 1e9:.1f} billion parameters" if count >= 1e9 else f"{count / 1e6:.1f} million parameters"


def micro_batches(count: int) -> str:
    """`1 micro-batch`, `4 micro-batches`."""
    return f"{count} micro-batch{'es' if count > 1 else ''}"
