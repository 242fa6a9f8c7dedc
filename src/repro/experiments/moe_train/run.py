"""One training run, with the routing measured while it lasts."""

import functools
from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from repro.experiments.base import Outcome
from repro.experiments.common.launched import need_device
from repro.experiments.common.texts import FILES, read, windows
from repro.experiments.moe_train import EARLY, LATE, MoeTrain, MoeTrainMetrics, routing
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig

_SIZES = ("experts", "top_k", "layers", "hidden", "heads", "expert_hidden", "balance", "seq_len")


def run(point: MoeTrain) -> Outcome:
    """Series: what `train` gives. MissingHardware where there is no such device."""
    need_device(point.device)
    model, table = train(point)
    products = "float32, in training on a GPU bfloat16" if point.device == "cuda" else "float32"
    own = table[table.domain == point.text].set_index("iteration").drop(columns="domain")
    moments = {str(at): at for at in (EARLY, LATE) if at in own.index} | {"end": point.iterations}
    measured = {f"{name}_{moment}": own.loc[at, name] for name in own.columns for moment, at in moments.items()}
    parameters = sum(p.numel() for p in model.parameters())
    return Outcome(
        MoeTrainMetrics(**measured, **stay_over_time(own.stay), parameters=parameters),
        series=table,
        conditions={"products": products},
    )


def stay_over_time(stay: pd.Series, early: int = EARLY, late: int = LATE) -> dict[str, float | None]:
    """Of values by iteration: start, peak until `early`, low from there to `late` (None where the run ends before)."""
    low = stay.loc[early:late].min() if late in stay.index else None
    return {"stay_start": stay.loc[0], "stay_peak": stay.loc[1:early].max(), "stay_low": low}


@functools.lru_cache(maxsize=1)
def train(point: MoeTrain) -> tuple[GPTMoE, pd.DataFrame]:
    """The trained model, and a row per evaluated iteration and domain: shakespeare, python, and both together.

    The last result is kept, so that after a run its very model can be saved (`benchmarks/inputs/gpt_moe.py`).
    """
    texts = {name: read(name) for name in FILES}
    parts = [{name: text.train for name, text in texts.items()}, {name: text.held_out for name, text in texts.items()}]
    known, held_out = ({n: windows(t, point.eval_tokens, point.seq_len) for n, t in part.items()} for part in parts)
    rows: list[dict[str, float | str]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(point.threads)
    try:
        for iteration, model in _trained(point, [texts[name].train for name in texts if point.text in (name, "both")]):
            seen, unseen = ({n: routing.route(model, part[n]) for n in texts} for part in (known, held_out))
            seen["both"], unseen["both"] = (routing.join(list(each.values())) for each in (seen, unseen))
            for domain in unseen:
                found = routing.measure(seen[domain], unseen[domain], point.seed)
                rows.append({"iteration": iteration, "domain": domain, **found})
    finally:
        torch.set_num_threads(threads)
    return model, pd.DataFrame(rows)


def _trained(point: MoeTrain, texts: list[Tensor]) -> Iterator[tuple[int, GPTMoE]]:
    """The model after each of the point's evaluated iterations; 0: before training, and the last one is among them.

    Products in bfloat16 on a GPU. AdamW (0.9, 0.95; weight decay 0.1), gradients clipped to norm 1, and a rate that rises
    to `lr` and then stays: so the model after n iterations does not depend on how many follow.
    """
    batch = batches(texts, point.batch, point.seq_len, point.seed)
    torch.manual_seed(point.seed)
    model = GPTMoE(GPTMoEConfig(**{name: getattr(point, name) for name in _SIZES})).to(point.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=point.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for iteration in range(point.iterations + 1):
        if iteration in point.evaluated:
            yield iteration, model
        if iteration < point.iterations:
            for group in optimizer.param_groups:
                group["lr"] = point.lr * min(1.0, (iteration + 1) / point.lr_warmup)
            tokens = next(batch).to(point.device)
            optimizer.zero_grad()
            with torch.autocast(point.device, torch.bfloat16, enabled=point.device == "cuda"):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def batches(texts: list[Tensor], rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Random sequences, int64 [rows, length + 1], without end. Each row's text is drawn first: all weigh the same."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = [texts[i] for i in rng.integers(len(texts), size=rows)]
        starts = [int(rng.integers(len(text) - length)) for text in chosen]
        yield torch.stack([t[at : at + length + 1] for t, at in zip(chosen, starts, strict=True)]).long()
