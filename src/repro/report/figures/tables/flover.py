"""Tables of the notebook on Flover."""

import pandas as pd

from repro.report.figures.data import Data
from repro.report.figures.flover import of_one_model
from repro.report.figures.servers import NAMES


def identical(data: Data, *, model: str | None = None) -> pd.DataFrame:
    """How many requests were decoded again alone, and what share of their answers is identical."""
    worst = {"tokens_checked": "max", "tokens_equal_fraction": "min", "tokens_equal_or_tied_fraction": "min"}
    table = of_one_model(data.runs("flover_serving"), model).groupby(["workload", "name"]).agg(worst)
    return table.set_axis(["requests checked", "identical", "identical or tied"], axis=1).rename_axis(
        ["workload", "engine"]
    )


def foretold(data: Data, *, model: str | None = None) -> pd.DataFrame:
    """What the queue model predicted for a run, from iterations timed before it, and what was measured."""
    told = of_one_model(data.runs("flover_serving", predict=True), model).set_index(["workload", "requests", "name"])
    metrics = {"total_seconds": "total (s)", "latency_mean": "mean latency (s)", "latency_p99": "99th percentile (s)"}
    kinds = {"": "measured", "predicted_": "predicted", "error_": "error"}
    columns = {f"{kind}{metric}": (name, word) for metric, name in metrics.items() for kind, word in kinds.items()}
    table = told[list(columns)].round(3).rename_axis(["workload", "requests", "engine"])
    return table.set_axis(pd.MultiIndex.from_tuples(columns.values()), axis=1)


def tokens_of_servers(data: Data) -> pd.DataFrame:
    """How far the tokens of other servers agree with ours, and how far our own time drifted meanwhile."""
    names = {
        "tokens_equal_fraction": "identical answers",
        "tokens_before_difference": "tokens before the first other one",
        "fused_drift": "ours after ÷ before",
        "others_fraction": "share of other work on the machine",
    }
    told = data.runs("flover_peers").replace({"engine": NAMES}).groupby(["model", "dtype", "engine", "version"])
    return told[list(names)].mean().rename(columns=names).round(3)
