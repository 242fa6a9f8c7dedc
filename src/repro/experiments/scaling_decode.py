"""ExFlow at the paper's sizes: predicted decoding of its GPT-MoE on 4 to 64 A100s, with the tokens that leave a GPU measured on traces."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from repro.experiments._traces import ALL, ROUNDS, open_trace
from repro.experiments.base import Experiment, Outcome, Point
from repro.records.record import Metric

if TYPE_CHECKING:
    from repro.scaling.decode import Routing

PER_NODE = 4  # GPUs of a Wilkes3 node
MODES = ("two_all_to_alls", "coherent", "placed", "kv_sent", "balanced")


class ScalingDecode(Point):
    """The paper's machine; `hidden`, batch and context are not published. `seed` splits the trace and seeds the search and the draws."""

    experts: Literal[8, 16, 32, 64] = 16
    gpus: int = Field(8, ge=4)
    hidden: int = Field(1024, ge=64)
    tokens_per_gpu: int = Field(16, ge=1, description="requests of a GPU, a token each")
    context: int = Field(512, ge=0, description="tokens that each request has stored")
    time_limit_s: float = Field(20.0, gt=0, description="of the search for a placement")
    draws: int = Field(1000, ge=2, description="of the machine's uncertain parameters")

    @model_validator(mode="after")
    def _consistent(self) -> "ScalingDecode":
        if self.experts % self.gpus or self.gpus % PER_NODE:
            raise ValueError(
                f"gpus is {self.gpus}: whole nodes of {PER_NODE}, and {self.experts} experts must share evenly over them"
            )
        return self


def run(point: ScalingDecode) -> Outcome:
    """Bands of tokens per second of every mode, and of the paper's two ratios against two all-to-alls."""
    from dataclasses import replace

    from repro import scaling
    from repro.scaling import decode, moe
    from repro.scaling.whatif import banded

    contiguous, affinity = _routing(point, "contiguous"), _routing(point, "affinity")
    machine = scaling.hardware("wilkes3").machine(point.gpus // PER_NODE, point.draws, point.seed)
    model = moe.paper_models(point.hidden)[point.experts]
    size = (model, machine, point.tokens_per_gpu, point.context)
    # At home a token's expert may be anywhere; between layers it is where the placement puts it. Experts are as unevenly asked for.
    from_home = replace(decode.uniform(machine), max_load=contiguous.max_load)
    found = {
        "two_all_to_alls": decode.iteration(*size, "two_all_to_alls", from_home),
        "coherent": decode.iteration(*size, "coherent", contiguous),
        "placed": decode.iteration(*size, "placed", affinity),
        "kv_sent": decode.iteration(*size, "placed", affinity, kv_sent=True),
        # As if every GPU had as many tokens: what the placement is worth where training evens the load (the baseline's too).
        "balanced": decode.iteration(*size, "placed", replace(affinity, max_load=1.0)),
    }
    even_base = decode.iteration(*size, "two_all_to_alls", decode.uniform(machine))
    metrics = {}
    for name, iteration in found.items():
        metrics |= _metrics(banded(f"tokens_per_s_{name}", iteration.tokens_per_s), "tokens/s")
        metrics |= _metrics(banded(f"routing_s_{name}", iteration.all_to_all_s), "s")
    for name in MODES[1:]:
        base = even_base if name == "balanced" else found["two_all_to_alls"]
        metrics |= _metrics(banded(f"speedup_{name}", base.seconds / found[name].seconds), "×")
        metrics |= _metrics(banded(f"routing_reduction_{name}", 1 - found[name].all_to_all_s / base.all_to_all_s), "1")
    for name, routing in (("contiguous", contiguous), ("affinity", affinity)):
        metrics[f"crossing_{name}"] = Metric(value=routing.crossing_fraction, unit="1")
        metrics[f"node_crossing_{name}"] = Metric(value=routing.node_crossing_fraction, unit="1")
        metrics[f"max_load_{name}"] = Metric(value=routing.max_load, unit="×")
    return Outcome(metrics, "modelled", topology=f"Wilkes3, {point.gpus} A100 (arithmetic)")


def _routing(point: ScalingDecode, method: Literal["contiguous", "affinity"]) -> "Routing":
    """What a placement does to the tokens of held-out text, on our trained model of as many experts."""
    from repro import exflow
    from repro.scaling.decode import Routing

    train, held_out = open_trace(f"gpt_moe_{point.experts}e", 1).parts(ALL, ALL, point.seed)
    counts = exflow.transitions(train)
    placement = exflow.place(counts, point.gpus, PER_NODE, method, point.seed, point.time_limit_s, ROUNDS)
    return Routing.of(exflow.evaluate(placement, held_out))


def _metrics(band: dict[str, float], unit: str) -> dict[str, Metric]:
    return {name: Metric(value=value, unit=unit) for name, value in band.items()}


def label(point: ScalingDecode) -> str:
    """Short name of a point for its record file."""
    return f"{point.experts}e-{point.gpus}gpus-h{point.hidden}-b{point.tokens_per_gpu}"


_BANDS = [
    *(f"{kind}_{mode}" for kind in ("tokens_per_s", "routing_s") for mode in MODES),
    *(f"{kind}_{mode}" for kind in ("speedup", "routing_reduction") for mode in MODES[1:]),
]
EXPERIMENT = Experiment(
    summary="Predicted expert-parallel decoding on 4 to 64 GPUs, with measured hops",
    parameters=ScalingDecode,
    run=run,
    label=label,
    reports=frozenset(f"{name}{end}" for name in _BANDS for end in ("_low", "", "_high"))
    | {
        f"{what}_{method}"
        for what in ("crossing", "node_crossing", "max_load")
        for method in ("contiguous", "affinity")
    },
    timed=False,
)
