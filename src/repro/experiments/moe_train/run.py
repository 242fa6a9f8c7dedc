"""One training run, with the routing measured while it lasts."""

import functools

import pandas as pd
import torch

from repro.experiments.base import Outcome
from repro.experiments.common.texts import FILES, read, windows
from repro.experiments.moe_train import EARLY, LATE, MoeTrain, MoeTrainMetrics, routing, training
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig

_SIZES = ("experts", "top_k", "layers", "hidden", "heads", "expert_hidden", "balance", "seq_len")


@functools.lru_cache(maxsize=1)
def train(point: MoeTrain) -> tuple[GPTMoE, pd.DataFrame]:
    """The trained model, and a row per evaluated iteration and domain: shakespeare, python, and both together.

    The last result is kept, so that after a run its very model can be saved (`benchmarks/inputs/gpt_moe.py`).
    """
    texts = {name: read(name) for name in FILES}
    known, held_out = (
        {name: windows(part(text), point.eval_tokens, point.seq_len) for name, text in texts.items()}
        for part in (lambda text: text.train, lambda text: text.held_out)
    )
    rows: list[dict[str, float | str]] = []

    def look(iteration: int, model: GPTMoE) -> None:
        seen, unseen = ({n: routing.route(model, part[n]) for n in texts} for part in (known, held_out))
        seen["both"], unseen["both"] = (routing.join(list(each.values())) for each in (seen, unseen))
        for domain in unseen:
            found = routing.measure(seen[domain], unseen[domain], point.seed)
            rows.append({"iteration": iteration, "domain": domain, **found})

    used = [texts[name].train for name in texts if point.text in (name, "both")]
    batches = training.batches(used, point.batch, point.seq_len, point.seed)
    config = GPTMoEConfig(**{name: getattr(point, name) for name in _SIZES})
    threads = torch.get_num_threads()
    torch.set_num_threads(point.threads)
    try:
        model = training.train(
            config, batches, point.iterations, point.lr, point.lr_warmup, point.seed, point.evaluated, look
        )
    finally:
        torch.set_num_threads(threads)
    return model, pd.DataFrame(rows)


def run(point: MoeTrain) -> Outcome:
    """Series: what `train` gives."""
    model, table = train(point)
    own = table[table.domain == point.text].set_index("iteration").drop(columns="domain")
    moments = {str(at): at for at in (EARLY, LATE) if at in own.index} | {"end": point.iterations}
    measured = {f"{name}_{moment}": own.loc[at, name] for name in own.columns for moment, at in moments.items()}
    parameters = sum(p.numel() for p in model.parameters())
    return Outcome(MoeTrainMetrics(**measured, **stay_over_time(own.stay), parameters=parameters), series=table)


def stay_over_time(stay: pd.Series, early: int = EARLY, late: int = LATE) -> dict[str, float | None]:
    """Start, peak until `early`, and low from `early` to `late` (None where the run ends before), of values by
    iteration."""
    low = stay.loc[early:late].min() if late in stay.index else None
    return {"stay_start": stay.loc[0], "stay_peak": stay.loc[1:early].max(), "stay_low": low}
