"""Our plans beside Megatron-FSDP's: the same runs, and without a GPU a reason. `tests/baselines/test_megatron.py` trains."""

import pytest
import torch
from pydantic import ValidationError

from repro import experiments
from repro.experiments.base import MissingHardware
from repro.experiments.zero_peers import EXPERIMENT, ZeroPeers
from repro.experiments.zero_train import ZeroTrain

SMALL = {"layers": 1, "hidden": 32, "steps": 3, "packages": 1, "fabric": "unshaped"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_skipped_with_the_reason():
    with pytest.raises(MissingHardware, match="runs on GPUs only, and there is none"):
        EXPERIMENT.run(ZeroPeers(**SMALL))


def test_our_plans_run_as_in_zero_train():
    point = {**SMALL, "plan": "hfsdp"}
    ours, there = (
        experiments.get(name).run(kind(**point))
        for name, kind in (("zero_peers", ZeroPeers), ("zero_train", ZeroTrain))
    )
    for name in ("loss_first", "loss_last", "state_bytes_per_rank", "bytes_cluster"):
        assert getattr(ours.metrics, name) == getattr(there.metrics, name)


def test_memory_is_that_of_our_plan_and_sums_in_32_bits():
    large = {"nodes": 4, "layers": 44, "hidden": 4352, "heads": 32, "vocab": 50432}
    of_plan = experiments.get("zero_train").memory(ZeroTrain(plan="hfsdp", **large))
    assert EXPERIMENT.memory(ZeroPeers(plan="hfsdp", **large)) == of_plan > 1e9
    parameters = ZeroTrain(**large).gpt.parameters
    assert EXPERIMENT.memory(ZeroPeers(**large)) == pytest.approx(of_plan + 2 * parameters / 4)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"nodes": 1}, "several nodes of several ranks"),
        ({"packages": 1, "gcds": 1}, "several nodes of several ranks"),
        ({"dtype": "float16"}, "block and dtype"),
        ({"block": 64}, "block and dtype"),
    ],
)
def test_what_does_not_fit_is_refused(changed, says):
    with pytest.raises(ValidationError, match=says):
        ZeroPeers(**changed)
