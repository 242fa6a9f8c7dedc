"""Decode with a GPT-MoE whose experts are spread over ranks: with two all-to-alls per layer or one, experts placed by rank order
or by affinity, over the emulated three-level network where the machine allows it."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from repro.experiments.base import Experiment, MissingHardware, Outcome, Point, Shape
from repro.records.record import Metric

if TYPE_CHECKING:
    import pandas as pd

    from repro.experiments._moe_ranks import Report
    from repro.models.gpt_moe import GPTMoEConfig
    from repro.topology import Topology

LEVELS = ("package", "node", "cluster")
ROUTING = ("all_to_all", "all_to_all_parts", "all_gather", "all_gather_kv")
PARTS = ("attention", "gate", "expert", "head", "other", *ROUTING)
SIZES = ("layers", "hidden", "heads", "kv_heads", "expert_hidden", "top_k")
TIMEOUT_S = 1800.0


class MoEDecodePoint(Point):
    """One model, one way to decode. Ranks: nodes * packages * gcds; `requests` and their prompts are bytes of held-out text."""

    system: Literal["two_all_to_alls", "coherent", "deepspeed"] = "coherent"
    keys_values: Literal["gathered", "shared"] = "gathered"
    placement: Literal["contiguous", "random", "exflow", "affinity"] = "contiguous"
    profile_tokens: int = Field(
        8192, ge=2, description="tokens of training text whose routing the experts are placed by"
    )
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
    nodes: int = Field(2, ge=1)
    packages: int = Field(2, ge=1, description="GPU packages per node")
    gcds: int = Field(2, ge=1, description="ranks per package")
    # With 128 requests per rank a layer of the trained model moves 28 KiB a rank, half of it between nodes, for which 25 Mbit/s
    # need 5 ms: as long as 8 ranks on 2 cores need to start an exchange at all. Less would measure calls, not links.
    requests: int = Field(128, ge=1, description="per rank")
    prompt: int = Field(16, ge=1, description="tokens")
    new_tokens: int = Field(16, ge=3, description="per request")
    cluster_mbit_s: float = Field(25.0, gt=0)
    package_ratio: float = Field(16.0, gt=0)
    node_ratio: float = Field(4.0, gt=0)
    fabric: Literal["auto", "unshaped"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> "MoEDecodePoint":
        fields = type(self).model_fields
        if self.weights == "trained" and (changed := [n for n in SIZES if getattr(self, n) != fields[n].default]):
            raise ValueError(f"{', '.join(changed)}: sizes of a model with random weights, found weights trained")
        if self.system == "deepspeed" and self.placement != "contiguous":
            raise ValueError(f"placement is {self.placement}: deepspeed places in rank order, contiguous")
        if self.system != "coherent" and self.keys_values != "gathered":
            raise ValueError(
                f"keys_values is {self.keys_values}: only system coherent has the choice, found {self.system}"
            )
        if self.experts % self.ranks:
            raise ValueError(f"experts is {self.experts}: {self.ranks} ranks cannot share them evenly")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, allowed: 1 to {self.experts} (experts)")
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
    def random_sizes(self) -> "GPTMoEConfig":
        """Of a model with random weights."""
        from repro.models.gpt_moe import GPTMoEConfig

        names = ("experts", "top_k", "layers", "hidden", "heads", "expert_hidden")
        sizes = {name: getattr(self, name) for name in names}
        return GPTMoEConfig(**sizes, kv_heads=self.kv_heads or None, seq_len=max(128, self.prompt + self.new_tokens))


def run(point: MoEDecodePoint) -> Outcome:
    """Place, decode, and report times, bytes and rows. Times are of whole decoding iterations, prompts not counted; times of parts
    are of further iterations in which all ranks meet before each exchange. Series: a row per iteration and rank, seconds by part."""
    from repro import launch
    from repro.exflow.moe.cache import KeysValues
    from repro.experiments import _moe_ranks
    from repro.launch import network
    from repro.launch.joined import place_in_job

    if point.keys_values == "shared" and place_in_job() is not None:
        raise MissingHardware(
            "keys_values shared needs memory that all ranks see; in a job ranks sit on several machines"
        )
    if point.system == "deepspeed":
        from repro.baselines import deepspeed_moe

        deepspeed_moe.prepare()
    model = _moe_ranks.build(point)
    gpu = _moe_ranks.placed(point, model)
    prompts = _moe_ranks.prompts(point)
    shared = point.keys_values == "shared"
    memory = KeysValues.shared(model.config, len(prompts), point.prompt + point.new_tokens) if shared else None
    with network.between(point.topology, point.fabric) as links:
        reports = launch.launch(
            *(_moe_ranks.decode, point.ranks, point, model, gpu, prompts, memory, links.fabric),
            fabric=links.fabric,
            topology=point.topology,
            timeout_s=TIMEOUT_S - 15,
            first_only=True,
        )
    equal = _moe_ranks.equal_to_one_process(point, model, prompts, reports[0].tokens)
    return Outcome(
        metrics=_metrics(point, reports, equal),
        evidence=links.evidence,
        conditions={"fabric": links.state, "requests_checked": str(min(_moe_ranks.CHECKED, len(prompts)))},
        series=_series(reports),
        topology=f"{point.nodes} nodes x {point.packages} packages x {point.gcds} ranks, {links.state}",
    )


def _series(reports: "list[Report]") -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame(
        {"rank": rank, "iteration": number, "aligned": aligned, "seconds": one.seconds, **one.parts}
        for rank, report in enumerate(reports)
        for aligned, iterations in ((False, report.free), (True, report.aligned))
        for number, one in enumerate(iterations)
    )


def _metrics(point: MoEDecodePoint, reports: "list[Report]", equal: float) -> dict[str, Metric]:
    """Seconds are those of the slowest rank, or, of parts, of the average rank; bytes and rows are of all ranks. Per iteration."""
    from statistics import median

    iterations = [[report.free[n] for report in reports] for n in range(len(reports[0].free))]
    seconds = median(max(one.seconds for one in ranks) for ranks in iterations)
    metrics = {
        "iteration_seconds": Metric(value=seconds, unit="s"),
        "tokens_per_s": Metric(value=point.ranks * point.requests / seconds, unit="tokens/s"),
        "cache_bytes_per_rank": Metric(value=max(report.cache_bytes for report in reports), unit="bytes"),
        "tokens_equal": Metric(value=equal, unit="1"),
    }
    aligned = [[report.aligned[n] for report in reports] for n in range(len(reports[0].aligned))]
    for part in PARTS:
        means = [sum(one.parts[part] for one in ranks) / len(ranks) for ranks in aligned]
        metrics[f"seconds_{part}"] = Metric(value=median(means), unit="s")
    routing = sum(metrics[f"seconds_{part}"].value for part in ROUTING)
    metrics["routing_seconds"] = Metric(value=routing, unit="s")
    every = [one for ranks in iterations for one in ranks]
    per_iteration = 1 / len(iterations)
    for part in ROUTING:
        nbytes = sum(sum(one.sent[part].values()) for one in every)
        metrics[f"bytes_{part}"] = Metric(value=nbytes * per_iteration, unit="bytes")
    for level in LEVELS:
        nbytes = sum(sent[level] for one in every for sent in one.sent.values())
        metrics[f"bytes_{level}"] = Metric(value=nbytes * per_iteration, unit="bytes")
    metrics["bytes"] = Metric(value=sum(metrics[f"bytes_{level}"].value for level in LEVELS), unit="bytes")
    if rows := sum(sum(one.rows.values()) for one in every):
        left = sum(count for one in every for level, count in one.rows.items() if level != "own")
        metrics["leaving_fraction"] = Metric(value=left / rows, unit="1")
        metrics["leaving_node_fraction"] = Metric(value=sum(one.rows["cluster"] for one in every) / rows, unit="1")
    return metrics


def _label(point: MoEDecodePoint) -> str:
    keys_values = f"-{point.keys_values}" if point.system == "coherent" else ""
    sizes = "" if point.weights == "trained" else f"-top{point.top_k}-h{point.hidden}kv{point.kv_heads or point.heads}"
    shape = f"{point.nodes}x{point.packages}x{point.gcds}"
    end = "-unshaped" if point.fabric == "unshaped" else ""
    return f"{point.system}{keys_values}-{point.placement}-{point.experts}e{sizes}-{shape}-{point.requests}req{end}"


REPORTS = """iteration_seconds tokens_per_s routing_seconds cache_bytes_per_rank tokens_equal bytes leaving_fraction
    leaving_node_fraction fabric requests_checked"""
EXPERIMENT = Experiment(
    summary="Expert-parallel decoding: tokens/s, time per part and bytes with two all-to-alls, one, and placement, and DeepSpeed's",
    parameters=MoEDecodePoint,
    run=run,
    label=_label,
    reports=frozenset(
        REPORTS.split() + [f"seconds_{part}" for part in PARTS] + [f"bytes_{name}" for name in (*ROUTING, *LEVELS)]
    ),
    shape=lambda point: Shape(point.nodes, point.packages, point.gcds),
    one_machine=lambda point: point.keys_values == "shared",
    timeout_s=TIMEOUT_S,
)
