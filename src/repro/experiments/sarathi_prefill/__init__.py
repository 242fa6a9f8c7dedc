"""SARATHI (arXiv 2308.16369) on this engine: what decoding costs beside a chunk of a prompt, and what that is worth."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, Seconds, metrics

# chunked: SARATHI's, a chunk of a prompt and all who decode in every pass. request_level: a batch of prompts, then their
# answers, then the next batch. iteration_level: newcomers' whole prompts in the next pass. bounded: this package's
# default, chunks as large as the bound on the wait for a next token allows.
POLICIES = ("chunked", "request_level", "iteration_level", "bounded")
SWEEPS = 3  # of a round, each begun anew: in one of a few seconds a slow moment of the machine would be the median


class PrefillPoint(Point):
    """`piggyback`: a pass of `decodes` rows alone, and beside a chunk. `throughput`: equal requests, all there at the
    start, under each policy; `slots` of them run at once. By default prompts are chunk / (slots - 1) times as long as
    answers, where the paper's gain is largest: then the chunks of a prompt carry the answers of all others."""

    measures: Literal["piggyback", "throughput"] = "piggyback"
    model: Literal["random-40m", "random-110m", "random-1b", "smollm2-135m"] = "random-40m"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    chunk: int = Field(64, ge=1, description="prompt tokens of a pass")
    prompt_tokens: int = Field(
        240, ge=1, description="piggyback: stored tokens of who decodes; throughput: of a prompt"
    )
    decodes: int = Field(4, ge=1, description="piggyback: rows that decode")
    output_tokens: int = Field(30, ge=2, description="throughput: of an answer")
    requests: int = Field(18, ge=1, description="throughput")
    slots: int = Field(9, ge=1, description="throughput: requests that run at once")
    rounds: int = Field(1, ge=1, description="of 3 sweeps; throughput: each policy forth and back; piggyback: 48 turns")

    def contradictions(self) -> Iterator[str]:
        own = {"piggyback": ("decodes",), "throughput": ("output_tokens", "requests", "slots")}
        for measures, names in own.items():
            for name in names:
                if measures != self.measures and getattr(self, name) != type(self).model_fields[name].default:
                    yield f"{name} is {getattr(self, name)}: only where {measures} is measured"

    @property
    def label(self) -> str:
        sizes = f"d{self.decodes}" if self.measures == "piggyback" else f"p{self.prompt_tokens}-d{self.output_tokens}"
        return f"{self.measures}-{self.model}-{sizes}-c{self.chunk}-{self.dtype}"


_TIMES = ("seconds", "ttft_mean", "gap_longest")


class PrefillMetrics(
    metrics(Seconds | None, "decode_pass_s", "chunk_pass_s", "mixed_pass_s", "token_alone_s", "token_beside_s"),
    metrics(Seconds | None, *(f"{policy}_{time}" for policy in POLICIES for time in _TIMES)),
    metrics(Number | None, *(f"{policy}_error_seconds" for policy in POLICIES)),
):
    """Medians of passes. `token_alone_s`: of a pass that only decodes, by its rows; `token_beside_s`: by how much rows
    that decode make a pass with a chunk longer, by these rows.

    Of a policy: until all are done, mean time to first token, longest wait for a next token (medians, two values of
    each sweep; answers of request_level are handed back at their end, so that it has no wait), and predicted ÷
    measured - 1 of the queue model: its median, given times of passes measured at both ends of the same sweeps."""


EXPERIMENT = Experiment(PrefillPoint, PrefillMetrics, conditions=("weights", "threads", "kernels"))
