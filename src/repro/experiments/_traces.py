"""The shipped routing traces by name, their domains, and the parts of them that experts are placed by and judged on."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from repro import exflow, paths
from repro.exflow.trace import Trace

TraceName = Literal["gptoss20b", "gpt_moe_8e", "gpt_moe_16e", "gpt_moe_32e", "gpt_moe_64e", "gpt_moe_16e_shakespeare"]
ROUNDS = 30  # of every search for a placement: a record repeats exactly where its time limit does not cut it
TRAIN_FRACTION = 0.7  # of gpt-oss's sequences
ALL = "all"  # domains
DOMAINS = {
    "gptoss20b": (ALL, "mmlu", "mmlu_pro", "gpqa", "sorry_bench"),
    "gpt_moe": (ALL, "shakespeare", "python"),
}


@dataclass(frozen=True)
class Source:
    """A trace and, by token, its domain and whether it is held out whatever the seed (None: drawn by the seed)."""

    trace: Trace
    domain: np.ndarray
    held_out: np.ndarray | None

    def parts(self, train_domain: str, test_domain: str, seed: int) -> tuple[Trace, Trace]:
        """(tokens to place by, tokens to judge on): of these domains, and never of the same sequence."""
        if self.held_out is None:
            train, _ = self.trace.split(TRAIN_FRACTION, seed)
            held_out = ~np.isin(self.trace.sequences, train.sequences)
        else:
            held_out = self.held_out
        return self.trace.take(~held_out & self.of(train_domain)), self.trace.take(held_out & self.of(test_domain))

    def of(self, domain: str) -> np.ndarray:
        """Bool [tokens]: those of a domain."""
        return np.ones(self.trace.tokens, bool) if domain == ALL else self.domain == domain


def experts(name: TraceName) -> int:
    """Experts per layer of a trace, without reading it."""
    return 32 if name == "gptoss20b" else int(_variant(name).split("e")[0])


def widest(name: TraceName) -> int:
    """Experts per token and layer that a trace knows."""
    return 4 if name == "gptoss20b" else 1


def domains(name: TraceName) -> tuple[str, ...]:
    """The domains of a trace."""
    return DOMAINS["gptoss20b" if name == "gptoss20b" else "gpt_moe"]


def describe(name: TraceName, domain: str, top_k: int = 1) -> str:
    """For a record's conditions."""
    own = f"GPT-MoE with {experts(name)} experts" + (", trained on Shakespeare," if "shakespeare" in name else "")
    model = "gpt-oss-20b" if name == "gptoss20b" else own
    return f"{model} top-{top_k}, {'all domains' if domain == ALL else domain}"


def open_trace(name: TraceName, top_k: int = 1) -> Source:
    """Read a shipped trace, the first k experts of each token."""
    if name == "gptoss20b":
        path = paths.data("gptoss20b_routing.npz")
        with np.load(path) as file:
            names, of_sequence = file["dataset_names"], file["dataset"]
        families = np.array([_family(str(each)) for each in names])
        trace = exflow.load_trace(path, experts(name), top_k)
        return Source(trace, families[of_sequence][trace.sequences], None)
    path = paths.data(f"gpt_moe_routing_{_variant(name)}.npz")
    with np.load(path) as file:
        domain, held_out = file["domain_names"][file["domain"]], file["held_out"]
    trace = exflow.load_trace(path, experts(name))
    return Source(trace, domain[trace.sequences], held_out[trace.sequences])


def _variant(name: TraceName) -> str:
    """Of a GPT-MoE: its experts and, if not both, the text that it was trained on."""
    return name.removeprefix("gpt_moe_")


def _family(dataset: str) -> str:
    """Parts of one benchmark (its test, validation and development sets) are one domain."""
    return next(
        (family for family in ("mmlu_pro", "mmlu", "gpqa", "sorry_bench") if dataset.startswith(family)), dataset
    )
