"""This engine beside other servers, from the rounds that `benchmarks/serving.py --csv` kept: for docs/flover.md."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from repro import paths

SHORT = {"random-110m": ", LLaMA M", "smollm2-135m": ", SmolLM2", "bfloat16": "bf16", "float32": "fp32"}
HIGHER = ("tokens/s",)  # is better; of all other columns less is
AIM = {"tokens/s": 1.1, "TTFT mean": 0.9, "latency p99": 0.9}  # ours ÷ the best peer's


@dataclass(frozen=True)
class Setting:
    """Servers on the same requests, in turns.

    name      workload, model where it is not LLaMA S, and dtype
    ratio     by column, ours ÷ the best peer's: geometric mean over the rounds, the smallest and the largest
    medians   by column, ours and that of the best peer
    """

    name: str
    ratio: Mapping[str, tuple[float, float, float]]
    medians: Mapping[str, tuple[float, float]]

    def misses(self, column: str) -> bool:
        """Whether ours is further from the best peer than aimed at, by the digits that are shown."""
        shown = round(self.ratio[column][0], 2)
        return shown < AIM[column] if column in HIGHER else shown > AIM[column]


def settings(reference: str) -> list[Setting]:
    """Of a machine's folder of shipped records, in the order in which they ran, without those beside other load.

    OSError without the file; KeyError for a column that it lacks (NameError for load); ValueError for a setting without a round of ours and a peer's.
    """
    rows = pd.read_csv(paths.root() / reference / "benchmarks" / "serving.csv").query("load == 0")
    found = rows.groupby(["workload", "model", "dtype"], sort=False)
    return [_setting(f"`{w}`{SHORT.get(m, '')}, {SHORT.get(d, d)}", some) for (w, m, d), some in found]


def _setting(name: str, rows: pd.DataFrame) -> Setting:
    ratio, medians = {}, {}
    for column in (*AIM, "× bound", "gap"):
        table = rows.pivot(index="round", columns="server", values=column).dropna(
            axis=1, how="all"
        )  # some do not tell it
        others = [server for server in table if not server.startswith("ours")]  # "ours, ...": with other limits
        table = table.reindex(columns=["ours", *others]).dropna()
        if table.empty or not others:
            raise ValueError(f"{name}, {column}: no round has this engine and another server")
        peers = table[others]
        logs = np.log(peers.rdiv(table.ours, axis=0))
        best = logs.mean().idxmin() if column in HIGHER else logs.mean().idxmax()
        ratio[column] = tuple(float(np.exp(each)) for each in (logs[best].mean(), logs[best].min(), logs[best].max()))
        of_peers = peers.median()
        theirs = of_peers.max() if column in HIGHER else of_peers.min()
        medians[column] = float(table.ours.median()), float(theirs)
    return Setting(name, ratio, medians)
