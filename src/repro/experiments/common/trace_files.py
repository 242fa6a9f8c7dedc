"""Read the shipped routing traces, and split them into tokens to place experts by and tokens to judge a placement."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from repro import exflow, paths
from repro.exflow.trace import Trace
from repro.experiments.common.traces import ALL, TraceName, domains, experts

TRAIN_FRACTION = 0.7  # of gpt-oss's sequences
# A GPT-MoE's sequences are windows of two texts, and those beside each other in a text are alike (the same module of
# Python). So many are resampled together: standard errors grow up to there, and not beyond.
NEIGHBOURS = 8


@dataclass(frozen=True)
class Source:
    """A trace and, by token, its domain and whether it is held out.

    `continuous`: sequences are windows of texts, which are the domains; else each stands on its own."""

    trace: Trace
    domain: np.ndarray
    held_out: np.ndarray
    continuous: bool

    def parts(self, train_domain: str = ALL, test_domain: str = ALL) -> tuple[Trace, Trace]:
        """(tokens to place by, tokens to judge on): of these domains, and never of the same sequence."""
        train, test = ~self.held_out & self.of(train_domain), self.held_out & self.of(test_domain)
        return self.trace.take(train), self.trace.take(test)

    def of(self, domain: str) -> np.ndarray:
        """Bool [tokens]: those of a domain."""
        return np.ones(self.trace.tokens, bool) if domain == ALL else self.domain == domain

    def resampled(self, part: Trace) -> pd.DataFrame:
        """`stratum` and `unit` of each token of a part, as `common.sequences` takes them, and its `sequence`."""
        ids, first = np.unique(self.trace.sequences, return_index=True)
        strata = self.domain[first] if self.continuous else np.full(len(ids), "")
        together = NEIGHBOURS if self.continuous else 1
        sequence = part.sequences
        stratum = strata[np.searchsorted(ids, sequence)]
        return pd.DataFrame({"stratum": stratum, "unit": sequence // together, "sequence": sequence})


def open_trace(name: TraceName, seed: int, top_k: int = 1) -> Source:
    """Read a shipped trace, the first k experts of each token. `seed` draws what of gpt-oss is held out."""
    variant = name.removeprefix("gpt_moe_")
    path = paths.data("gptoss20b_routing.npz" if name == "gptoss20b" else f"gpt_moe_routing_{variant}.npz")
    trace = exflow.load_trace(path, experts(name), top_k)
    with np.load(path) as file:
        if name != "gptoss20b":
            domain, held_out = file["domain_names"][file["domain"]], file["held_out"]
            return Source(trace, domain[trace.sequences], held_out[trace.sequences], continuous=True)
        # Parts of one benchmark (its test, validation and development sets) are one domain.
        known = sorted(domains(name), key=len, reverse=True)
        families = [next((d for d in known if part.startswith(d)), part) for part in map(str, file["dataset_names"])]
        train, _ = trace.split(TRAIN_FRACTION, seed)
        held_out = ~np.isin(trace.sequences, train.sequences)
        return Source(trace, np.array(families)[file["dataset"]][trace.sequences], held_out, continuous=False)
