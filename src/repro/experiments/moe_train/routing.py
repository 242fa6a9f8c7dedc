"""How a GPT-MoE routes text."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from scipy.stats import entropy
from torch import Tensor

from repro import exflow
from repro.exflow.recording import record_routing
from repro.exflow.trace import Trace
from repro.models.gpt_moe import GPTMoE

ROWS = 32  # sequences of one forward pass


@dataclass(frozen=True)
class Routed:
    """Tokens that went through a model: the first choice of each in each layer, and the loss in nats."""

    trace: Trace
    loss: float

    @property
    def loads(self) -> np.ndarray:
        """Share of the tokens that each expert takes, [layers, E]; even: 1/E."""
        counts = [np.bincount(layer, minlength=self.trace.num_experts) for layer in self.trace.experts.T]
        return np.stack(counts) / self.trace.tokens

    def shuffled(self, rng: np.random.Generator) -> "Routed":
        """The control: the tokens of each layer permuted on their own. Loads stay, links between layers are gone."""
        return Routed(Trace(rng.permuted(self.trace.experts, axis=0), self.trace.num_experts), self.loss)


@torch.no_grad()
def route(model: GPTMoE, sequences: Tensor) -> Routed:
    """Run `sequences`, int64 [n, length + 1], through the model, on its device."""
    device = model.tokens.weight.device
    with record_routing(model) as recording:
        losses = [
            F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
            for rows in sequences.to(device).split(ROWS)
        ]
    trace = recording.trace().top(1)
    return Routed(trace, sum(losses) / trace.tokens)


def join(parts: list[Routed]) -> Routed:
    """All tokens of several texts, of the same model."""
    loss = np.average([part.loss for part in parts], weights=[part.trace.tokens for part in parts])
    experts = np.concatenate([part.trace.experts for part in parts])
    return Routed(Trace(experts, parts[0].trace.num_experts), float(loss))


def stay(known: np.ndarray, counts: np.ndarray) -> float:
    """Share of transitions that stay on their GPU, with one expert a GPU and layer, placed by the transitions `known`
    and counted on others, both [layers-1, E, E]; even routing without affinity gives 1/E.

    With one expert a GPU the names of a layer's GPUs are free, so the paper's integer program falls apart into one
    assignment problem per pair of layers, solved exactly here.
    """
    chosen = [linear_sum_assignment(pair, maximize=True) for pair in known]
    return float(sum(pair[at].sum() for pair, at in zip(counts, chosen, strict=True)) / counts.sum())


def measure(known: Routed, held_out: Routed, seed: int) -> dict[str, float]:
    """Of one text at one iteration: loss, affinity and evenness of the routing of `held_out`, with experts placed by
    `known`.

    The affinity of shuffled tokens shows what uneven loads alone give and how the estimates are biased.
    """
    rng = np.random.default_rng(seed)
    numbers = {"loss": held_out.loss}
    for suffix, *both in (("", known, held_out), ("_shuffled", known.shuffled(rng), held_out.shuffled(rng))):
        seen, counted = (exflow.transitions(each.trace) for each in both)
        bits, share = exflow.affinity.mutual_information(counted)
        numbers[f"mutual_information{suffix}"] = float(bits.mean())
        numbers[f"normalized_mutual_information{suffix}"] = float(share.mean())
        numbers[f"stay{suffix}"] = stay(seen, counted)
    loads, experts = held_out.loads, held_out.trace.num_experts
    numbers["busiest"] = float(loads.max(axis=1).mean() * experts)
    numbers["evenness"] = float((entropy(loads, axis=1) / np.log(experts)).mean())
    return numbers
