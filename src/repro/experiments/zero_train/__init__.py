"""Train a GPT under a ZeRO plan, or under a library's, on real ranks: over the emulated three-level network where the
machine allows it, and over the machine's own network in a job of a cluster."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, get_args

from pydantic import Field

from repro.experiments.base import Bytes, Experiment, Nats, Number, Seconds, Tflops, metrics
from repro.experiments.common.names import NamedPlan
from repro.experiments.common.ranks import LEVELS, LevelName, OnRanks

if TYPE_CHECKING:
    from repro.models.gpt import GPTConfig

WARM_UP = 2  # steps that are not timed: first connections, FSDP's lazy initialisation, allocator

Variants = Literal["qgz_one_hop", "best"]
Libraries = Literal["deepspeed_zero3", "deepspeed_zeropp", "fsdp2", "fsdp2_hsdp", "fsdp2_reshard"]
OF_NODES = ("deepspeed_zeropp", "fsdp2_hsdp", "fsdp2_reshard")
BITS = r"^(16|8|4)(,(16|8|4),(16|8|4))?$"
CHANGES = ("weights", "gradients", "secondary", "weight_bits", "gradient_bits", "reduce_across")  # of plan hierarchical


class ZeroTrain(OnRanks):
    """One training run."""

    plan: NamedPlan | Variants | Libraries = "hierarchical"
    # Changes to the hierarchical plan: levels, and bits as one number or one per level, innermost first ("16,4,4").
    weights: LevelName = "package"
    gradients: LevelName = "node"
    secondary: Literal["none", "package", "node"] = "none"
    weight_bits: str = Field("8", pattern=BITS, coerce_numbers_to_str=True)
    gradient_bits: str = Field("4", pattern=BITS, coerce_numbers_to_str=True)
    reduce_across: Literal["step", "micro_batch"] = "step"
    block: int = Field(256, ge=0, description="values per quantisation scale; 0: one scale per message")
    # 3.8 M parameters in 2 blocks and 32 tokens: 8 ranks on 2 cores move megabytes and compute little, so that the
    # network decides. With 4 blocks of the same parameters in all, the calls of FSDP take half as long again.
    layers: int = Field(2, ge=1, le=1000)
    hidden: int = Field(384, ge=1)
    heads: int = Field(4, ge=1)
    seq_len: int = Field(32, ge=1)
    vocab: int = Field(256, ge=256, description="the text has 256 symbols")
    checkpointing: bool = Field(False, description="recompute activations in the backward")
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    micro_batch: int = Field(1, ge=1, description="sequences per rank and backward")
    accumulation: int = Field(1, ge=1, description="backward passes per step")
    steps: int = Field(5, ge=WARM_UP + 1)
    lr: float = Field(1e-3, gt=0)
    # Without a warm-up Adam's first, still badly known second moments throw the loss from 3.5 to 7 within a step, at
    # other steps in other plans: the curves would then compare accidents (docs/log.md).
    lr_warmup: int = Field(20, ge=1, description="steps in which the learning rate rises to lr")

    def contradictions(self) -> Iterator[str]:
        if self.changes and self.plan != "hierarchical":
            yield f"{', '.join(self.changes)} can only be changed with plan hierarchical, found {self.plan}"
        if LEVELS.index(self.weights) > LEVELS.index(self.gradients):
            yield f"weights over {self.weights}, gradients over {self.gradients}: gradients need a level at least as wide"
        if self.secondary != "none" and LEVELS.index(self.secondary) >= LEVELS.index(self.weights):
            yield f"secondary over {self.secondary}, weights over {self.weights}: secondary needs a level below"
        if self.hidden % self.heads:
            yield f"hidden {self.hidden} is not divisible by {self.heads} heads"
        if self.plan in OF_NODES and (self.nodes < 2 or self.packages * self.gcds < 2):
            yield f"plan {self.plan} needs several nodes of several ranks, found {self.shape_label}"
        if self.plan in get_args(Libraries) and (self.block != 256 or self.dtype == "float16"):
            yield f"block and dtype float16 are settings of our engine, found plan {self.plan}"

    @property
    def changes(self) -> list[str]:
        """Fields of `CHANGES` that differ from their defaults."""
        return [name for name in CHANGES if getattr(self, name) != type(self).model_fields[name].default]

    @property
    def label(self) -> str:
        """Plan, changes to it, machine, micro-batches x steps."""
        changes = "".join(f"-{name.replace('_', '')}{getattr(self, name)}".replace(",", "_") for name in self.changes)
        return f"{self.plan}{changes}-{self.shape_label}-{self.accumulation}x{self.steps}{self.fabric_label}"

    @property
    def gpt(self) -> "GPTConfig":
        """Sizes of the model."""
        from repro.models.gpt import GPTConfig

        names = ("layers", "hidden", "heads", "seq_len", "vocab", "checkpointing")
        return GPTConfig(**{name: getattr(self, name) for name in names})


class ZeroTrainMetrics(
    metrics(Seconds | None, "compute_seconds", "predicted_step_seconds"),
    metrics(Nats, "loss_first", "loss_last"),
    metrics(Bytes, "model_bytes", "state_bytes_per_rank"),
    metrics(Bytes | None, *(f"{what}_{level}" for what in ("bytes", "wire") for level in LEVELS)),
):
    """Per step. Seconds are from the end of the step before, so what it left under way counts. Bytes are those that all
    ranks send over a level by our ledger; a library has none. `wire_*`: as the kernel counts them on a shaped network.
    `predicted_*`: the arithmetic of `repro.zero`, for our plans. `model_bytes`: 2 per parameter, for any `dtype`."""

    step_seconds: Seconds
    tflops_per_rank: Tflops
    parameters: Number
    predicted_state_bytes_per_rank: Bytes | None = None


def _memory(point: ZeroTrain) -> float | None:
    from repro.experiments.zero_train.plans import memory

    return memory(point)


EXPERIMENT = Experiment(ZeroTrain, ZeroTrainMetrics, conditions=("fabric",), memory=_memory, timeout_s=3600)
