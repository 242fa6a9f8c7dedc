"""Train a GPT under a ZeRO plan, or under a library's, on real ranks: over the emulated three-level network where the machine
allows it, and over the machine's own network in a job of a cluster."""

import functools
import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from repro.experiments.base import Experiment, Outcome, Point, Shape
from repro.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.experiments._zero_ranks import Report
    from repro.models.gpt import GPTConfig
    from repro.topology import Topology
    from repro.zero import Plan
    from repro.zero.layout import Layout

WARM_UP = 2  # steps that are not timed: first connections, FSDP's lazy initialisation, allocator
LAST = 25  # steps that loss_last averages, at most a quarter of all
LEVELS = ("package", "node", "cluster")
TIMEOUT_S = 3600.0

Ours = Literal[
    *("ddp", "zero1", "zero2", "zero3", "hpz", "qwz", "qgz", "zeropp", "mics", "hsdp", "hierarchical"),
    *("hierarchical_fp", "qgz_one_hop", "best"),
]
Libraries = Literal["deepspeed_zero3", "deepspeed_zeropp", "fsdp2", "fsdp2_hsdp", "fsdp2_reshard"]
LevelName = Literal["package", "node", "cluster"]
BITS = r"^(16|8|4)(,(16|8|4),(16|8|4))?$"
CHANGES = ("weights", "gradients", "secondary", "weight_bits", "gradient_bits", "reduce_across")  # of plan hierarchical


class ZeroTrain(Point):
    """One training run. Ranks: nodes * packages * gcds."""

    plan: Ours | Libraries = "hierarchical"
    # Changes to the hierarchical plan: levels, and bits as one number or one per level, innermost first ("16,4,4").
    weights: LevelName = "package"
    gradients: LevelName = "node"
    secondary: Literal["none", "package", "node"] = "none"
    weight_bits: str = Field("8", pattern=BITS)
    gradient_bits: str = Field("4", pattern=BITS)
    reduce_across: Literal["step", "micro_batch"] = "step"
    block: int = Field(256, ge=0, description="values per quantisation scale; 0: one scale per message")
    nodes: int = Field(2, ge=1)
    packages: int = Field(2, ge=1, description="GPU packages per node")
    gcds: int = Field(2, ge=1, description="ranks per package")
    # 3.8 M parameters in 2 blocks and 32 tokens: a step in which 8 ranks on 2 cores move megabytes and compute little, so that
    # the network decides. With 4 blocks of the same parameters in all, the calls of FSDP take half as long again.
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
    # Rate of the inter-node link per rank with all ranks busy, Mbit/s; package and node links are faster by the ratios, 16 and
    # 4 on Frontier. 8 ranks on 2 cores push 400 to 900 Mbit/s each without shaping, so at 25 even the package link (400)
    # is decided by the shaper and not by the cores: all three rates are exact and the ratio of 16:4:1 holds.
    cluster_mbit_s: float = Field(25.0, gt=0)
    package_ratio: float = Field(16.0, gt=0)
    node_ratio: float = Field(4.0, gt=0)
    fabric: Literal["auto", "unshaped"] = "auto"

    @field_validator("weight_bits", "gradient_bits", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) else value

    @model_validator(mode="after")
    def _consistent(self) -> "ZeroTrain":
        changed = [name for name in CHANGES if getattr(self, name) != type(self).model_fields[name].default]
        if changed and self.plan != "hierarchical":
            raise ValueError(f"{', '.join(changed)} can only be changed with plan hierarchical, found {self.plan}")
        if LEVELS.index(self.weights) > LEVELS.index(self.gradients):
            raise ValueError(
                f"weights over {self.weights}, gradients over {self.gradients}: gradients need a level at least as wide"
            )
        if self.plan in Libraries.__args__ and (self.block != 256 or self.dtype == "float16"):
            raise ValueError(f"block and dtype float16 are settings of our engine, found plan {self.plan}")
        return self

    @property
    def ranks(self) -> int:
        return self.nodes * self.packages * self.gcds

    @property
    def topology(self) -> "Topology":
        """Sizes and rates of the levels."""
        from repro.topology import Level, Topology

        slow = self.cluster_mbit_s * 1e6 / 8
        return Topology(
            (
                Level("package", self.gcds, slow * self.package_ratio),
                Level("node", self.packages, slow * self.node_ratio),
                Level("cluster", self.nodes, slow),
            )
        )

    @property
    def gpt(self) -> "GPTConfig":
        """Sizes of the model."""
        from repro.models.gpt import GPTConfig

        names = ("layers", "hidden", "heads", "seq_len", "vocab", "checkpointing")
        return GPTConfig(**{name: getattr(self, name) for name in names})


def run(point: ZeroTrain) -> Outcome:
    """Train, and report time, losses, bytes per level and memory."""
    import torch._dynamo  # noqa: F401  (AdamW imports it on first use: once here, not in 8 ranks at the same time)

    from repro import launch, paths, quantize
    from repro.baselines import systems
    from repro.experiments import _zero_ranks
    from repro.launch import network

    topology = point.topology
    plan = None if point.plan in systems.SYSTEMS else _plan(point, topology)
    systems.prepare(point.plan)
    quantize.warm_up()
    corpus = paths.data("tinyshakespeare.txt").read_bytes()
    # The launcher's limit comes first: it can tell a hang in a collective from slow work.
    limits = {"timeout_s": TIMEOUT_S - 15, "first_only": True}
    with network.between(topology, point.fabric) as links:
        reports = launch.launch(
            *(_zero_ranks.train, topology.world_size, point, plan, corpus, links.fabric),
            fabric=links.fabric,
            topology=topology,
            **limits,
        )
    return Outcome(
        metrics=_metrics(point, plan, reports, links.shaped),
        evidence=links.evidence,
        conditions={"fabric": links.state},
        series=_series(reports),
        topology=_describe(point, links.state),
    )


def memory(point: ZeroTrain) -> dict[str, float] | None:
    """Predicted bytes per rank: states, working memory and activations; None for a library's plan."""
    from repro.baselines import systems
    from repro.zero import memory as bytes_of

    if point.plan in systems.SYSTEMS:
        return None
    plan, model = _plan(point, point.topology), _layout(point)
    config = point.gpt
    return {
        **bytes_of.predict(plan, model),
        "working": bytes_of.working(plan, model),
        "activations": bytes_of.activations(
            config.layers,
            config.hidden,
            config.seq_len,
            point.micro_batch,
            config.vocab,
            checkpointing=point.checkpointing,
        ),
    }


def _plan(point: ZeroTrain, topology: "Topology") -> "Plan":
    from repro import zero
    from repro.zero import plan

    if point.plan == "hierarchical":
        chosen = plan.hierarchical(
            topology,
            point.weights,
            point.gradients,
            secondary=None if point.secondary == "none" else point.secondary,
            weight_bits=_bits(point.weight_bits),
            gradient_bits=_bits(point.gradient_bits),
            reduce_across=point.reduce_across,
        )
    elif point.plan == "qgz_one_hop":
        chosen = plan.qgz(topology, hops=1)
    elif point.plan == "best":
        chosen = zero.search(_layout(point), topology, micro_batches=point.accumulation)[0].plan
    else:
        chosen = plan.named(point.plan, topology)
    return plan.blockwise(chosen, point.block or 1 << 40)


def _bits(text: str) -> int | tuple[int, ...]:
    values = tuple(map(int, text.split(",")))
    return values if len(values) == 3 else values[0]


def _describe(point: ZeroTrain, state: str) -> str:
    rates = "/".join(f"{point.cluster_mbit_s * factor:g}" for factor in (point.package_ratio, point.node_ratio, 1))
    links = {"shaped": f"{rates} Mbit/s per rank", "the machine's own": "its own network"}.get(
        state, "unshaped loopback"
    )
    return f"{point.nodes} nodes x {point.packages} packages x {point.gcds} GCDs, {links}"


def _layout(point: ZeroTrain) -> "Layout":
    return _layout_of(point.gpt)


@functools.cache
def _layout_of(config: "GPTConfig") -> "Layout":
    import torch

    from repro.models.gpt import GPT
    from repro.zero.layout import layout

    with torch.device("meta"):
        return layout(GPT(config))


# --- numbers -------------------------------------------------------------------------------------------------------


def _series(reports: "list[Report]") -> "pd.DataFrame":
    """A row per step: mean loss, the slowest rank's seconds, bytes of all ranks per level (where there is a ledger)."""
    import pandas as pd

    rows = []
    for number, ranks in enumerate(zip(*(report.steps for report in reports), strict=True)):
        row = {"step": number, "loss": sum(rank.loss for rank in ranks) / len(ranks)}
        row["seconds"] = max(rank.seconds for rank in ranks)
        if ranks[0].sent is not None:
            row |= {f"bytes_{level}": sum(rank.sent[level] for rank in ranks) for level in LEVELS}
        rows.append(row)
    return pd.DataFrame(rows)


def _metrics(point: ZeroTrain, plan: "Plan | None", reports: "list[Report]", shaped: bool) -> dict[str, Metric]:
    table, parameters = _series(reports), point.gpt.parameters
    timed, first = table[WARM_UP:], reports[0]
    seconds = timed.seconds.median()
    metrics = {
        "step_seconds": Metric(value=seconds, unit="s"),
        "tflops_per_rank": Metric(value=_model_flops(point) / seconds / 1e12, unit="TFLOP/s"),
        "loss_first": Metric(value=table.loss.iloc[0], unit="nats"),
        "loss_last": Metric(value=table.loss.iloc[-min(LAST, math.ceil(len(table) / 4)) :].mean(), unit="nats"),
        "model_bytes": Metric(value=2 * parameters, unit="bytes"),
        "state_bytes_per_rank": Metric(value=max(report.state_bytes for report in reports), unit="bytes"),
        "parameters": Metric(value=parameters, unit="1"),
    }
    compute = None
    if first.compute_seconds is not None:
        compute = max(report.compute_seconds for report in reports)
        metrics["compute_seconds"] = Metric(value=compute, unit="s")
    for level in LEVELS:
        if first.steps[0].sent is not None:
            metrics[f"bytes_{level}"] = Metric(value=timed[f"bytes_{level}"].mean(), unit="bytes")
        if first.wire is not None:
            metrics[f"wire_{level}"] = Metric(value=first.wire[level], unit="bytes")
    return metrics | (_predictions(point, plan, compute if shaped else None) if plan else {})


def _predictions(point: ZeroTrain, plan: "Plan", compute: float | None) -> dict[str, Metric]:
    """What the arithmetic of `repro.zero` says of the same run: modelled, beside the measured numbers. The predicted step,
    for links of known rates, is the bound: measured compute, and bytes over rates."""
    from repro.zero import memory as bytes_of
    from repro.zero import traffic

    formula = sum(bytes_of.formula(plan, point.gpt.parameters).values())
    found = {"predicted_state_bytes_per_rank": Metric(value=formula, unit="bytes")}
    if compute is not None:
        bound = traffic.step_seconds(plan, _layout(point), point.accumulation, compute_s=compute)
        found["predicted_step_seconds"] = Metric(value=bound, unit="s")
    return found


def _model_flops(point: ZeroTrain) -> float:
    """FLOPs of one step of one rank, recomputation not counted: 72 B s l h^2 (1 + s / 6h + V / 12lh) (Narayanan et al. 2021)."""
    tokens = point.micro_batch * point.accumulation * point.seq_len
    layers, hidden = point.layers, point.hidden
    extra = 1 + point.seq_len / (6 * hidden) + point.vocab / (12 * layers * hidden)
    return 72 * tokens * layers * hidden**2 * extra


def label(point: ZeroTrain) -> str:
    """Short name of a point for its record file: plan, changes to it, machine, micro-batches x steps."""
    fields = type(point).model_fields
    changed = [name for name in CHANGES if getattr(point, name) != fields[name].default]
    changes = "".join(f"-{name.replace('_', '')}{getattr(point, name)}".replace(",", "_") for name in changed)
    shape = f"{point.nodes}x{point.packages}x{point.gcds}"
    return f"{point.plan}{changes}-{shape}-{point.accumulation}x{point.steps}" + (
        "-unshaped" if point.fabric == "unshaped" else ""
    )


REPORTS = """step_seconds tflops_per_rank loss_first loss_last parameters model_bytes state_bytes_per_rank
    predicted_state_bytes_per_rank compute_seconds predicted_step_seconds
    bytes_package bytes_node bytes_cluster wire_package wire_node wire_cluster fabric"""
EXPERIMENT = Experiment(
    summary="Step time, bytes per level, losses and memory of every ZeRO plan, and of DeepSpeed's and FSDP's",
    parameters=ZeroTrain,
    run=run,
    label=label,
    reports=frozenset(REPORTS.split()),
    shape=lambda point: Shape(point.nodes, point.packages, point.gcds),
    memory=memory,
    timeout_s=TIMEOUT_S,
)
