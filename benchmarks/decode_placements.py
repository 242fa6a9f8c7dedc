"""Tokens per second of MoE decoding under placements that serving teams know, beside ours; beyond the paper:
`python benchmarks/decode_placements.py [--repeats N] [--rates MBIT_S ...] [--extra-slots N]`.

The experiment `moe_decode` on 8 emulated ranks (its network needs root), a GPT-MoE of 16 experts: in rank order, under
EPLB and ours (`joint`), the last two with the same spare slots, with two all-to-alls per layer, as servers decode, and
with one, ids only. Runs of one repeat follow each other, and repeats have seeds of their own (prompts, profile,
search), so compare within a repeat: the table ends with mean ratios over EPLB and their range.
"""

import argparse
import itertools

import numpy as np
import pandas as pd

from repro import experiments
from repro.experiments.moe_decode import MoEDecodePoint

WAYS = {"two all-to-alls": {"system": "two_all_to_alls"}, "one, ids only": {"keys_values": "shared"}}
PLACEMENTS = ("contiguous", "eplb", "joint")
SHOWN = {"tokens_per_s": "tokens/s", "bytes": "bytes", "leaving_fraction": "leave the rank", "max_load": "busiest rank"}


def measure(repeats: int, rates: list[float], extra_slots: int) -> pd.DataFrame:
    """A row for every run, printed as it comes."""
    experiment, rows = experiments.get("moe_decode"), []
    for repeat, rate, placement, way in itertools.product(range(repeats), rates, PLACEMENTS, WAYS):
        slots = 0 if placement == "contiguous" else extra_slots
        point = MoEDecodePoint(placement=placement, extra_slots=slots, cluster_mbit_s=rate, seed=repeat, **WAYS[way])
        outcome = experiment.check(experiment.run(point))
        assert outcome.metrics.tokens_equal == 1, "a placement must not change a token"
        found = {name: getattr(outcome.metrics, metric) for metric, name in SHOWN.items()}
        rows.append({"Mbit/s": rate, "all-to-alls": way, "placed by": placement, "repeat": repeat} | found)
        print(
            pd.DataFrame(rows[-1:]).to_string(index=False, header=len(rows) == 1),
            outcome.conditions["fabric"],
            flush=True,
        )
    return pd.DataFrame(rows)


def against_eplb(runs: pd.DataFrame) -> pd.DataFrame:
    """By rate, way and placement: tokens/s over that of EPLB in the same repeat, mean on the logarithm and range; bytes
    over those of EPLB; the share of rows that leave their rank and the load of the busiest, means."""
    keys = ["Mbit/s", "all-to-alls", "repeat"]
    eplb = runs[runs["placed by"] == "eplb"].set_index(keys)
    own = runs.set_index(keys)
    ratios = {name: own[name] / eplb[name].reindex(own.index) for name in ("tokens/s", "bytes")}
    table = runs.assign(faster=ratios["tokens/s"].to_numpy(), sent=ratios["bytes"].to_numpy())
    grouped = table.groupby(["Mbit/s", "all-to-alls", "placed by"])
    return pd.DataFrame(
        {
            "tokens/s": grouped["tokens/s"].median().round(0),
            "÷ EPLB": grouped.faster.agg(lambda each: np.exp(np.log(each).mean())).round(3),
            "least": grouped.faster.min().round(3),
            "most": grouped.faster.max().round(3),
            "bytes ÷ EPLB": grouped.sent.mean().round(3),
            "leave the rank": grouped["leave the rank"].mean().round(3),
            "busiest rank": grouped["busiest rank"].mean().round(3),
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[6.25, 25.0, 100.0], help="Mbit/s between nodes, per rank"
    )
    parser.add_argument("--extra-slots", type=int, default=1, help="of every rank and layer, for copies of experts")
    options = parser.parse_args()
    print(against_eplb(measure(options.repeats, options.rates, options.extra_slots)).to_string())


if __name__ == "__main__":
    main()
