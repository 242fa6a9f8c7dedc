"""Tables of the notebook on ExFlow."""

import pandas as pd
from pandas.io.formats.style import Styler

from repro.report.figures.data import Data
from repro.report.figures.exflow import METHODS, MODELS, ONE_NODE, PLAIN, TEXTS, TRACE
from repro.report.figures.exflow_decode import BEYOND, KIND, SHAPE, SYSTEMS
from repro.report.figures.tables import rounded

_DECODING = {
    "tokens_per_s": "tokens/s",
    "routing_seconds": "exchanges (s)",
    "bytes": "bytes",
    "leaving_fraction": "rows that leave",
    "cache_bytes_per_rank": "K/V bytes per rank",
    "tokens_equal": "same tokens",
}


def affinities(data: Data) -> Styler:
    """Mutual information of neighbouring layers, by model, kind of text and number of tokens; means over pairs."""
    columns = {
        "mutual_information": "bits",
        "mutual_information_shuffled": "bits, shuffled",
        "normalized_mutual_information": "share of entropy",
    }
    runs = data.runs("exflow_affinity").astype({"tokens_used": int}).replace({"trace": MODELS, "domain": TEXTS})
    table = runs.groupby(["trace", "domain", "tokens_used"])[list(columns)].median().rename(columns=columns)
    return rounded(table.rename_axis(["model", "text", "tokens"]))


def placements(data: Data, *, trace: str = TRACE) -> Styler:
    """How good each placement in one node is, and how long it took; medians over seeds."""
    names = {"crossing_fraction": "crosses GPUs", "train_crossing_fraction": "of the tokens placed by"}
    names |= {"bound": "bound", "gap": "gap", "max_load": "busiest GPU", "seconds": "seconds"}
    table = data.runs("exflow_placement", trace=trace, **ONE_NODE).groupby(["gpus", "method"])[list(names)].median()
    return rounded(_by_method(table, names))


def placements_in_nodes(data: Data, *, trace: str = TRACE) -> Styler:
    """Share of transitions that leave the GPU and the node, in nodes of four GPUs; medians over seeds."""
    names = {"crossing_fraction": "crosses GPUs", "node_crossing_fraction": "crosses nodes"}
    names |= {"intra_hops": "hops in the node", "inter_hops": "hops between nodes", "max_load": "busiest GPU"}
    runs = data.runs("exflow_placement", trace=trace, gpus_per_node=4, train_tokens=0, **PLAIN)
    table = runs.groupby(["gpus", "method"])[list(names)].median()
    return rounded(_by_method(table, names))


def _by_method(table: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    words = {method: name for method, (name, _) in METHODS.items()}
    return table.rename(index=words, level="method").rename(columns=names).rename_axis(["GPUs", "placed by"])


def decoding(data: Data, *, requests: int = 128, cluster_mbit_s: float = 25) -> Styler:
    """Every model with trained weights under each system; medians over the runs."""
    runs = data.runs("moe_decode", weights="trained", requests=requests, cluster_mbit_s=cluster_mbit_s)
    return rounded(_systems(runs, ["experts", *SHAPE]))


def other_decoding(data: Data, *, cluster_mbit_s: float = 25) -> Styler:
    """Other rates, and random weights with two experts a token and fewer key-value heads; medians over the runs."""
    runs = data.runs("moe_decode")
    runs = runs[(runs.weights == "random") | (runs.cluster_mbit_s != cluster_mbit_s)]
    return rounded(
        _systems(runs, ["weights", "experts", *SHAPE, "hidden", "dtype", "top_k", "kv_heads", "cluster_mbit_s"])
    )


def _systems(runs: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Medians by `keys` and system, whose names are in words."""
    named = [
        (SYSTEMS | BEYOND).get(kind, " ".join(kind)).replace("\n", " ")
        for kind in zip(*(runs[k] for k in KIND), strict=True)
    ]
    table = runs.assign(decoded=named).groupby([*keys, "decoded"])[list(_DECODING)].median()
    return table.rename(columns=_DECODING).rename_axis([*keys[:-1], keys[-1].replace("_", " "), "system"])
