"""ExFlow at the paper's sizes: predicted decoding of its GPT-MoE on 4 to 64 A100s, with hops measured on traces."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Experiment, Number, Point, Ratio, Seconds, TokensPerSecond, bands, metrics

PER_NODE = 4  # GPUs of a Wilkes3 node
MODES = ("two_all_to_alls", "coherent", "placed", "kv_sent", "balanced")
# DeepSpeed-MoE with buffers for the fullest expert, on the trace's load and on an even one; and with its default options,
# which drop tokens: each with the mode that it is compared with.
BASELINES = {"deepspeed": "placed", "deepspeed_even": "balanced", "deepspeed_dropping": "placed"}
PLACEMENTS = ("contiguous", "affinity")
# Tokens of a GPU that are drawn, each as often: log-uniform. [INF] our prior, as the paper's batch was not found: from
# where latency decides to where bytes do.
BATCHES = (16, 32, 64, 128, 256, 512)


class ScalingDecode(Point):
    """The paper's machine; `hidden`, batch and context are not published. `seed`: of split, search and draws."""

    experts: Literal[8, 16, 32, 64] = 16
    gpus: int = Field(8, ge=4)
    hidden: int = Field(1024, ge=64)
    tokens_per_gpu: int = Field(0, ge=0, description="requests of a GPU, a token each; 0: drawn from `BATCHES`")
    context: int = Field(512, ge=0, description="tokens that each request has stored")
    time_limit_s: float = Field(20.0, gt=0, description="of the search for a placement")
    draws: int = Field(4000, ge=2, description="of the machine's uncertain parameters, the model's error and the batch")

    def contradictions(self) -> Iterator[str]:
        if self.experts % self.gpus or self.gpus % PER_NODE:
            yield f"gpus is {self.gpus}: whole nodes of {PER_NODE}, and {self.experts} experts must share evenly over them"

    @property
    def label(self) -> str:
        return f"{self.experts}e-{self.gpus}gpus-h{self.hidden}-b{self.tokens_per_gpu or 'drawn'}"


class ScalingDecodeMetrics(
    bands(TokensPerSecond, *(f"tokens_per_s_{mode}" for mode in (*MODES, *BASELINES))),
    bands(Seconds, *(f"routing_s_{mode}" for mode in (*MODES, *BASELINES))),
    bands(Number, *(f"all_to_all_share_{mode}" for mode in (*MODES, *BASELINES))),
    bands(Ratio, *(f"speedup_{mode}" for mode in MODES[1:]), *(f"speedup_over_{base}" for base in BASELINES)),
    bands(Number, *(f"routing_reduction_{mode}" for mode in MODES[1:])),
    bands(Number, *(f"routing_reduction_over_{base}" for base in BASELINES)),
    bands(Ratio | None, *(f"padding_{base}" for base in BASELINES)),  # records of before 2026-11-30 have no ends
    metrics(Number, *(f"{what}_{method}" for what in ("crossing", "node_crossing") for method in PLACEMENTS)),
    metrics(Ratio, *(f"max_load_{method}" for method in PLACEMENTS)),
):
    """The paper's two ratios, of every mode against two all-to-alls in which nothing is padded (of `balanced`: of even
    load too), and `over` DeepSpeed-MoE; the all-to-alls' share of an iteration; what a placement does to held-out
    tokens. `routing`: of all exchanges, the all-gathers of new tokens, and of keys and values where sent, as well as
    the all-to-alls. `padding`: places in a GPU's buffers over its tokens. Dropped tokens count as decoded."""


EXPERIMENT = Experiment(ScalingDecode, ScalingDecodeMetrics, timed=False)
