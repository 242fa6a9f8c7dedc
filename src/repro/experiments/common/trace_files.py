"""Read the shipped routing traces, and split them into tokens to place experts by and tokens to judge a placement."""

from dataclasses import dataclass

import numpy as np

from repro import exflow, paths
from repro.exflow.trace import Trace
from repro.experiments.common.traces import ALL, TraceName, domains, experts

TRAIN_FRACTION = 0.7  # of gpt-oss's sequences


@dataclass(frozen=True)
class Source:
    """A trace and, by token, its domain and whether it is held out."""

    trace: Trace
    domain: np.ndarray
    held_out: np.ndarray

    def parts(self, train_domain: str = ALL, test_domain: str = ALL) -> tuple[Trace, Trace]:
        """(tokens to place by, tokens to judge on): of these domains, and never of the same sequence."""
        train, test = ~self.held_out & self.of(train_domain), self.held_out & self.of(test_domain)
        return self.trace.take(train), self.trace.take(test)

    def of(self, domain: str) -> np.ndarray:
        """Bool [tokens]: those of a domain."""
        return np.ones(self.trace.tokens, bool) if domain == ALL else self.domain == domain


def open_trace(name: TraceName, seed: int, top_k: int = 1) -> Source:
    """Read a shipped trace, the first k experts of each token. `seed` draws what of gpt-oss is held out."""
    variant = name.removeprefix("gpt_moe_")
    path = paths.data("gptoss20b_routing.npz" if name == "gptoss20b" else f"gpt_moe_routing_{variant}.npz")
    trace = exflow.load_trace(path, experts(name), top_k)
    with np.load(path) as file:
        if name != "gptoss20b":
            domain, held_out = file["domain_names"][file["domain"]], file["held_out"]
            return Source(trace, domain[trace.sequences], held_out[trace.sequences])
        # Parts of one benchmark (its test, validation and development sets) are one domain.
        known = sorted(domains(name), key=len, reverse=True)
        families = [next((d for d in known if part.startswith(d)), part) for part in map(str, file["dataset_names"])]
        train, _ = trace.split(TRAIN_FRACTION, seed)
        held_out = ~np.isin(trace.sequences, train.sequences)
        return Source(trace, np.array(families)[file["dataset"]][trace.sequences], held_out)
