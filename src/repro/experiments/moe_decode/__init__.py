"""Decode with a GPT-MoE whose experts are spread over ranks: with two all-to-alls per layer or one, experts placed by
rank order or by affinity, over the emulated three-level network where the machine allows it."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from repro.experiments.base import Bytes, Experiment, Number, Seconds, TokensPerSecond, metrics
from repro.experiments.common.ranks import LEVELS, OnRanks

ALL_TO_ALL = ("all_to_all", "all_to_all_parts")
ROUTING = (*ALL_TO_ALL, "all_gather", "all_gather_kv")
COPYING = ("eplb", "joint")  # placements that copy experts into spare slots
PARTS = ("attention", "gate", "expert", "head", "other", *ROUTING)
WARM_UP = 2  # iterations that are not timed: first messages between ranks
SIZES = ("layers", "hidden", "heads", "kv_heads", "expert_hidden", "top_k")


class MoEDecodePoint(OnRanks):
    """One model, one way to decode. `requests`: their prompts are bytes of held-out text."""

    system: Literal["two_all_to_alls", "coherent", "deepspeed"] = "coherent"
    keys_values: Literal["gathered", "shared"] = "gathered"
    # eplb and joint are beyond the paper: what servers do, and fewer hops at no more load, both with copies of experts.
    placement: Literal["contiguous", "random", "exflow", "affinity", "eplb", "joint"] = "contiguous"
    extra_slots: int = Field(0, ge=0, description="of each rank and layer, for copies of experts; only eplb and joint")
    profile_tokens: int = Field(8192, ge=2, description="tokens of training text that the experts are placed by")
    weights: Literal["trained", "random"] = "trained"
    experts: int = Field(16, ge=2)
    # Sizes of a model with random weights; a trained one has its own.
    top_k: int = Field(1, ge=1)
    layers: int = Field(8, ge=2)
    hidden: int = Field(64, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(0, ge=0, description="0: as many as heads")
    expert_hidden: int = Field(64, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    # With 128 requests per rank a layer of the trained model moves 28 KiB a rank, half of it between nodes: 5 ms at
    # 25 Mbit/s. 8 ranks on 2 cores need as long to start an exchange, so less would measure calls, not links.
    requests: int = Field(128, ge=1, description="per rank")
    prompt: int = Field(16, ge=1, description="tokens")
    new_tokens: int = Field(16, ge=WARM_UP + 2, description="per request: the first by its prompt, then the warm-up")

    def contradictions(self) -> Iterator[str]:
        fields = type(self).model_fields
        if self.weights == "trained" and (changed := [n for n in SIZES if getattr(self, n) != fields[n].default]):
            yield f"{', '.join(changed)}: sizes of a model with random weights, found weights trained"
        if self.system == "deepspeed" and self.placement != "contiguous":
            yield f"placement is {self.placement}: deepspeed places in rank order, contiguous"
        if self.system != "coherent" and self.keys_values != "gathered":
            yield f"keys_values is {self.keys_values}: only system coherent has the choice, found {self.system}"
        if self.extra_slots and self.placement not in COPYING:
            yield f"extra_slots is {self.extra_slots}: only placements {' and '.join(COPYING)} copy experts"
        if self.extra_slots > (most := self.experts - self.experts // self.ranks):
            yield f"extra_slots is {self.extra_slots}, allowed: 0 to {most}, where every rank has all experts"
        if self.experts % self.ranks:
            yield f"experts is {self.experts}: {self.ranks} ranks cannot share them evenly"
        if self.top_k > self.experts:
            yield f"top_k is {self.top_k}, allowed: 1 to {self.experts} (experts)"

    @property
    def one_machine(self) -> bool:
        return self.keys_values == "shared"

    @property
    def label(self) -> str:
        keys_values = f"-{self.keys_values}" if self.system == "coherent" else ""
        random = f"-top{self.top_k}-h{self.hidden}kv{self.kv_heads or self.heads}"
        sizes = "" if self.weights == "trained" else random
        copies = f"+{self.extra_slots}" if self.extra_slots else ""
        model = f"{self.placement}{copies}-{self.experts}e{sizes}"
        return f"{self.system}{keys_values}-{model}-{self.shape_label}-{self.requests}req{self.fabric_label}"


class MoEDecodeMetrics(
    metrics(Seconds, *(f"seconds_{part}" for part in PARTS)),
    metrics(Bytes, *(f"bytes_{name}" for name in (*ROUTING, *LEVELS))),
):
    """Per decoding iteration, prompts not counted. Seconds are those of the slowest rank, or, of parts, of the average
    rank in further iterations in which all ranks meet before each exchange. Bytes and rows are of all ranks.

    `all_to_all_share`: of the all-to-alls in the seconds of all ranks, 0 to 1, without waiting for ranks that come late
    to an exchange; `all_to_all_share_waiting`: with it, as a profiler of the running decoder sees it. `max_load`: rows
    of the rank whose experts get the most over the even share, mean over layers and iterations.
    """

    iteration_seconds: Seconds
    routing_seconds: Seconds
    tokens_per_s: TokensPerSecond
    cache_bytes_per_rank: Bytes
    tokens_equal: Number
    bytes: Bytes
    leaving_fraction: Number | None = None
    leaving_node_fraction: Number | None = None
    all_to_all_share: Number | None = None  # None: of a record from before it was taken
    all_to_all_share_waiting: Number | None = None
    max_load: Number | None = None  # None: also of DeepSpeed's layers


EXPERIMENT = Experiment(MoEDecodePoint, MoEDecodeMetrics, conditions=("fabric", "requests_checked"), timeout_s=1800)
