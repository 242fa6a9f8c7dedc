"""Train the GPT-MoE on bytes of text, and measure how it routes text that it has not seen.

On purpose without `repro.exflow`: a training run takes a quarter of an hour, and its record would become stale with every change of
the placement search. `tests/exflow/test_moe_train.py` holds these numbers against `repro.exflow`.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from scipy.stats import entropy
from torch import Tensor, nn

from repro import paths
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig

FILES = {"shakespeare": "tinyshakespeare.txt", "python": "python_stdlib.txt"}
HELD_OUT = 0.1  # the end of each text, never trained on
ROWS = 32  # sequences of one forward pass of an evaluation


@dataclass(frozen=True)
class Text:
    """Bytes of one text, uint8: what the model trains on, and the part behind it that it does not."""

    train: Tensor
    held_out: Tensor


def read(name: str) -> Text:
    """A shipped text: "shakespeare" or "python"."""
    content = torch.frombuffer(bytearray(paths.data(FILES[name]).read_bytes()), dtype=torch.uint8)
    cut = len(content) - int(HELD_OUT * len(content))
    return Text(content[:cut], content[cut:])


def windows(text: Tensor, tokens: int, length: int) -> Tensor:
    """About `tokens` bytes as sequences spread evenly over `text`, int64 [sequences, length + 1]: each with the byte behind it.
    They do not overlap as long as the text is long enough. ValueError when it is shorter than one."""
    if len(text) <= length:
        raise ValueError(f"a text of {len(text)} bytes has no sequence of seq_len {length}")
    starts = np.linspace(0, len(text) - length - 1, max(tokens // length, 1)).astype(int)
    return torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()


# --- training --------------------------------------------------------------------------------------------------------


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


# --- routing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routed:
    """Tokens that went through a model: the first choice of each in each layer, int64 [tokens, layers], and the loss in nats."""

    experts: np.ndarray
    num_experts: int
    loss: float

    @property
    def loads(self) -> np.ndarray:
        """Share of the tokens that each expert takes, [layers, E]; even: 1/E."""
        return np.stack([np.bincount(layer, minlength=self.num_experts) for layer in self.experts.T]) / len(
            self.experts
        )

    @property
    def transitions(self) -> np.ndarray:
        """Tokens that go from expert a of layer l to expert b of layer l+1, int64 [layers-1, E, E]."""
        size = self.num_experts
        pairs = self.experts[:, :-1] * size + self.experts[:, 1:]
        return np.stack([np.bincount(pair, minlength=size * size).reshape(size, size) for pair in pairs.T])

    def shuffled(self, rng: np.random.Generator) -> "Routed":
        """The control: the tokens of each layer permuted on their own. Loads stay, every link between layers is gone."""
        return Routed(rng.permuted(self.experts, axis=0), self.num_experts, self.loss)


@torch.no_grad()
def route(model: GPTMoE, sequences: Tensor) -> Routed:
    """Run `sequences`, int64 [n, length + 1], through the model."""
    found: list[list[Tensor]] = [[] for _ in model.blocks]
    with contextlib.ExitStack() as hooks:
        for block, layer in zip(model.blocks, found, strict=True):
            handle = block.router.register_forward_hook(lambda _, __, out, layer=layer: layer.append(out[2][:, 0]))
            hooks.callback(handle.remove)
        losses = [
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
            for rows in sequences.split(ROWS)
        ]
    experts = torch.stack([torch.cat(layer) for layer in found], dim=1).numpy()
    return Routed(experts, model.config.experts, sum(losses) / len(experts))


def join(parts: list[Routed]) -> Routed:
    """All tokens of several texts, of the same model."""
    loss = np.average([part.loss for part in parts], weights=[len(part.experts) for part in parts])
    return Routed(np.concatenate([part.experts for part in parts]), parts[0].num_experts, float(loss))


def mutual_information(counts: np.ndarray) -> tuple[float, float]:
    """(bits, share of the next layer's entropy), means over the pairs of layers of counts [layers-1, E, E]."""
    before, after = (entropy(counts.sum(axis=axis), base=2, axis=1) for axis in (2, 1))
    bits = np.maximum(before + after - entropy(counts.reshape(len(counts), -1), base=2, axis=1), 0)
    return float(bits.mean()), float(np.divide(bits, after, out=np.zeros_like(bits), where=after > 0).mean())


def stay(known: np.ndarray, counts: np.ndarray) -> float:
    """Share of transitions that stay on their GPU, with one expert a GPU and layer, placed by the transitions `known` and counted
    on others, both [layers-1, E, E]; even routing without affinity gives 1/E.

    With one expert a GPU the names of a layer's GPUs are free, so the paper's integer program falls apart into one assignment
    problem per pair of layers, solved exactly here.
    """
    chosen = [linear_sum_assignment(pair, maximize=True) for pair in known]
    return float(sum(pair[at].sum() for pair, at in zip(counts, chosen, strict=True)) / counts.sum())


def measure(known: Routed, held_out: Routed, seed: int) -> dict[str, float]:
    """Of one text at one iteration: loss, affinity (beside that of shuffled tokens, which shows what uneven loads alone give and
    how the estimates are biased) and evenness of the routing; all of `held_out`, with experts placed by `known`."""
    rng = np.random.default_rng(seed)
    numbers = {"loss": held_out.loss}
    for suffix, seen, counted in (("", known, held_out), ("_shuffled", known.shuffled(rng), held_out.shuffled(rng))):
        bits, share = mutual_information(counted.transitions)
        names = (f"mutual_information{suffix}", f"normalized_mutual_information{suffix}", f"stay{suffix}")
        numbers |= dict(zip(names, (bits, share, stay(seen.transitions, counted.transitions)), strict=True))
    loads = held_out.loads
    numbers["busiest"] = float(loads.max(axis=1).mean() * held_out.num_experts)
    numbers["evenness"] = float((entropy(loads, axis=1) / np.log(held_out.num_experts)).mean())
    return numbers
