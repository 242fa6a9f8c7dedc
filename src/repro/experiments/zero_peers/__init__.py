"""Our plans beside libraries that train on GPUs only: Megatron-FSDP's HFSDP, which is our plan `hfsdp`. The model, the
data and what is measured are those of `zero_train`."""

from collections.abc import Iterator
from typing import Literal

from repro.experiments.base import Experiment
from repro.experiments.zero_train import ZeroTrain, ZeroTrainMetrics

MEGATRON = "megatron_hfsdp"


class ZeroPeers(ZeroTrain):
    """One training run."""

    plan: Literal["megatron_hfsdp", "hfsdp", "hierarchical"] = "megatron_hfsdp"

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.nodes < 2 or self.packages * self.gcds < 2:
            yield f"several nodes of several ranks are what HFSDP is for, found {self.shape_label}"
        if self.plan == MEGATRON and (self.block != 256 or self.dtype == "float16"):
            yield f"block and dtype float16 are settings of our engine, found plan {self.plan}"

    @property
    def ours(self) -> ZeroTrain:
        """The same run by our engine: under the plan that Megatron-FSDP's is, where it is Megatron-FSDP's."""
        return ZeroTrain(**self.model_dump() | {"plan": "hfsdp" if self.plan == MEGATRON else self.plan})


def _memory(point: ZeroPeers) -> float | None:
    from repro.experiments.zero_train.plans import memory

    needed = memory(point.ours)
    if needed is None or point.plan != MEGATRON:
        return needed
    return needed + 2 * point.gpt.parameters / (point.packages * point.gcds)  # its sums of gradients are in 32 bits


EXPERIMENT = Experiment(ZeroPeers, ZeroTrainMetrics, conditions=("fabric",), memory=_memory, timeout_s=3600)
