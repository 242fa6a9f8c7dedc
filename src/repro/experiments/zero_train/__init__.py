"""Train a GPT under a ZeRO plan, or under a library's, on real ranks: over the emulated three-level network where the
machine allows it, and over the machine's own network in a job of a cluster."""

from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from repro.experiments.base import Bytes, Experiment, Metrics, Nats, Number, Seconds, Tflops
from repro.experiments.common.names import NamedPlan
from repro.experiments.common.ranks import LEVELS, OnRanks

if TYPE_CHECKING:
    from repro.models.gpt import GPTConfig

WARM_UP = 2  # steps that are not timed: first connections, FSDP's lazy initialisation, allocator
TIMEOUT_S = 3600.0

Variants = Literal["qgz_one_hop", "best"]
Libraries = Literal["deepspeed_zero3", "deepspeed_zeropp", "fsdp2", "fsdp2_hsdp", "fsdp2_reshard"]
LevelName = Literal["package", "node", "cluster"]
BITS = r"^(16|8|4)(,(16|8|4),(16|8|4))?$"
CHANGES = ("weights", "gradients", "secondary", "weight_bits", "gradient_bits", "reduce_across")  # of plan hierarchical


class ZeroTrain(OnRanks):
    """One training run."""

    plan: NamedPlan | Variants | Libraries = "hierarchical"
    # Changes to the hierarchical plan: levels, and bits as one number or one per level, innermost first ("16,4,4").
    weights: LevelName = "package"
    gradients: LevelName = "node"
    secondary: Literal["none", "package", "node"] = "none"
    weight_bits: str = Field("8", pattern=BITS)
    gradient_bits: str = Field("4", pattern=BITS)
    reduce_across: Literal["step", "micro_batch"] = "step"
    block: int = Field(256, ge=0, description="values per quantisation scale; 0: one scale per message")
    # 3.8 M parameters in 2 blocks and 32 tokens: a step in which 8 ranks on 2 cores move megabytes and compute little,
    # so that the network decides. With 4 blocks of the same parameters in all, the calls of FSDP take half as long
    # again.
    layers: int = Field(2, ge=1)
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

    @field_validator("weight_bits", "gradient_bits", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _consistent(self) -> "ZeroTrain":
        if self.changes and self.plan != "hierarchical":
            raise ValueError(f"{', '.join(self.changes)} can only be changed with plan hierarchical, found {self.plan}")
        if LEVELS.index(self.weights) > LEVELS.index(self.gradients):
            raise ValueError(
                f"weights over {self.weights}, gradients over {self.gradients}: gradients need a level at least as wide"
            )
        if self.plan in get_args(Libraries) and (self.block != 256 or self.dtype == "float16"):
            raise ValueError(f"block and dtype float16 are settings of our engine, found plan {self.plan}")
        return self

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


class ZeroTrainMetrics(Metrics):
    """Per step. Bytes are those that all ranks send over a level by our ledger; a library has none. `wire_*`: as the
    kernel counts them on a shaped network. `predicted_*`: the arithmetic of `repro.zero`, for our plans."""

    step_seconds: Seconds
    compute_seconds: Seconds | None = None
    predicted_step_seconds: Seconds | None = None
    tflops_per_rank: Tflops
    loss_first: Nats
    loss_last: Nats
    parameters: Number
    model_bytes: Bytes
    state_bytes_per_rank: Bytes
    predicted_state_bytes_per_rank: Bytes | None = None
    bytes_package: Bytes | None = None
    bytes_node: Bytes | None = None
    bytes_cluster: Bytes | None = None
    wire_package: Bytes | None = None
    wire_node: Bytes | None = None
    wire_cluster: Bytes | None = None


def _memory(point: ZeroTrain) -> dict[str, float] | None:
    from repro.experiments.zero_train.plans import memory

    return memory(point)


EXPERIMENT = Experiment(
    parameters=ZeroTrain, metrics=ZeroTrainMetrics, conditions=("fabric",), memory=_memory, timeout_s=TIMEOUT_S
)
