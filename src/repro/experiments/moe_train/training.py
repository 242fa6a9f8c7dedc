"""Train a GPT-MoE on bytes of text."""

from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from repro.models.gpt_moe import GPTMoE, GPTMoEConfig


def batches(texts: list[Tensor], rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Random sequences, int64 [rows, length + 1], without end; each row's text is drawn first, so all weigh the same."""
    rng = np.random.default_rng(seed)
    while True:
        chosen = [texts[i] for i in rng.integers(len(texts), size=rows)]
        starts = [int(rng.integers(len(text) - length)) for text in chosen]
        yield torch.stack([t[at : at + length + 1] for t, at in zip(chosen, starts, strict=True)]).long()


def train(
    config: GPTMoEConfig,
    batch: Iterator[Tensor],
    iterations: int,
    lr: float,
    warmup: int,
    seed: int,
    look_at: Collection[int],
    look: Callable[[int, GPTMoE], None],
) -> GPTMoE:
    """AdamW (0.9, 0.95; weight decay 0.1), gradients clipped to norm 1, and a rate that rises to `lr` over `warmup` iterations and
    then stays: so the model after n iterations does not depend on how many follow. `look(n, model)` is called after n iterations
    for each n in `look_at`, 0 being the model before training."""
    torch.manual_seed(seed)
    model = GPTMoE(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for iteration in range(iterations + 1):
        if iteration in look_at:
            look(iteration, model)
        if iteration < iterations:
            for group in optimizer.param_groups:
                group["lr"] = lr * min(1.0, (iteration + 1) / warmup)
            tokens = next(batch)
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return model
