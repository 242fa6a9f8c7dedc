"""The ladder of assumptions, and draws from wide priors of all of them."""

import pandas as pd

from repro.experiments.base import Outcome
from repro.experiments.scaling_ladder import NUMBERS, SHARES, ScalingLadder, ScalingLadderMetrics
from repro.scaling import ladder

KEPT = 2000  # draws of which the series tells what was drawn, and as many at most that reach all numbers


def run(point: ScalingLadder) -> Outcome:
    """Series, by `kind`: cumulative and single have a row per scenario, set a row per choice and value, joint a row per
    combination of choices, draw some draws."""
    rungs, sampled = ladder.explain(), ladder.sample(point.draws, point.seed)
    path, single = (rungs[rungs.kind == kind] for kind in ("cumulative", "single"))
    shares = ladder.shares(sampled)
    metrics = ScalingLadderMetrics(
        **{f"{at}_{name}": float(path[name].iloc[i]) for at, i in (("start", 0), ("end", -1)) for name in NUMBERS},
        **{f"single_{name}": float(single[f"reached_{name}"].sum()) for name in NUMBERS},
        **{f"share_{name}": shares[name] for name in SHARES},
        changes=len(single),
        draws=len(sampled),
    )
    some = sampled.sample(min(KEPT, len(sampled)), random_state=point.seed)
    hits = sampled[sampled.reached].head(KEPT)
    kept = sampled.loc[some.index.union(hits.index)].assign(
        kind="draw", typical=lambda table: table.index.isin(some.index)
    )
    choices = [ladder.sets(sampled).assign(kind="set"), ladder.joint(sampled).assign(kind="joint")]
    series = pd.concat([rungs, *choices, kept], ignore_index=True)
    return Outcome(metrics, "modelled", {"priors": ladder.priors()}, series, "frontier, 48 nodes (arithmetic)")
