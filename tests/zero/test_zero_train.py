"""The experiment: what it reports, with and without the emulated network."""

import pytest

from repro import experiments, fabric
from repro.experiments.zero_train import ZeroTrain
from repro.quantize import payload_bytes

TINY = {"layers": 1, "hidden": 32, "heads": 2, "seq_len": 8, "steps": 4, "packages": 1}
METRICS = {
    *("step_seconds", "loss_first", "loss_last", "model_bytes", "parameters"),
    *("bytes_package", "bytes_node", "bytes_cluster", "state_bytes_per_rank", "predicted_state_bytes_per_rank"),
}


@pytest.mark.parametrize("plan", ["hierarchical", "zeropp"])
def test_unshaped_run(plan):
    outcome = experiments.get("zero_train").run(ZeroTrain(plan=plan, fabric="unshaped", accumulation=2, **TINY))
    values = {name: metric.value for name, metric in outcome.metrics.items()}
    assert set(values) == METRICS
    assert outcome.evidence == "measured" and outcome.conditions == {"fabric": "unshaped: asked for"}
    assert values["model_bytes"] == 2 * values["parameters"]
    assert values["state_bytes_per_rank"] == values["predicted_state_bytes_per_rank"] + 2 * 4  # Adam's step counters
    assert list(outcome.series.columns) == [
        "step",
        "loss",
        "seconds",
        *(f"bytes_{v}" for v in ("package", "node", "cluster")),
    ]
    assert outcome.series.step.tolist() == [0, 1, 2, 3]
    assert values["loss_first"] == outcome.series.loss[0] == pytest.approx(5.545, abs=0.1)
    assert (outcome.series.bytes_cluster == values["bytes_cluster"]).all() and values["bytes_node"] == 0


def test_bytes_of_the_smallest_plan_by_hand():
    """4 ranks, 2 nodes of one pair: a quarter of each of two buckets in INT8 and INT4 across nodes."""
    outcome = experiments.get("zero_train").run(ZeroTrain(fabric="unshaped", **TINY))
    block = 12 * 32 * 32 + 13 * 32
    buckets = (block, int(outcome.metrics["parameters"].value) - block)
    expected = sum(4 * payload_bytes(numel // 4, bits, 256) for numel in buckets for bits in (8, 4))
    assert outcome.metrics["bytes_cluster"].value == expected


@pytest.mark.root
@pytest.mark.skipif(fabric.unavailable() is not None, reason=f"no emulated network: {fabric.unavailable()}")
def test_shaped_run_counts_what_the_kernel_counts():
    """Between 1 and 1.1 bytes on the wire per byte of payload: TCP, IP and Ethernet headers, acknowledgements, barriers."""
    outcome = experiments.get("zero_train").run(ZeroTrain(plan="zero3", steps=4, layers=2, hidden=128))
    assert outcome.evidence == "emulated" and outcome.conditions == {"fabric": "shaped"}
    for level in ("package", "node", "cluster"):
        ratio = outcome.metrics[f"wire_{level}"].value / outcome.metrics[f"bytes_{level}"].value
        assert 1 < ratio < 1.1, level


def test_learning_rate_rises_over_the_first_steps():
    """With a warm-up of 2 steps, the first is at half the rate and the second at the whole."""

    def losses(**settings):
        point = ZeroTrain(plan="ddp", nodes=1, gcds=2, fabric="unshaped", **TINY, **settings)
        return experiments.get("zero_train").run(point).series.loss.tolist()

    constant, rising = losses(lr=1e-2, lr_warmup=1), losses(lr=2e-2, lr_warmup=2)
    assert constant[:2] == rising[:2]  # after one step at 1e-2
    assert constant[2:] != rising[2:]  # then 1e-2 again against 2e-2


def test_points():
    assert experiments.get("zero_train").ranks(ZeroTrain(nodes=3, packages=4, gcds=2)) == 24
    assert experiments.get("zero_train").label(ZeroTrain(plan="ddp")).startswith("ddp-2x2x2")
    with pytest.raises(ValueError, match="greater than or equal to 3"):
        ZeroTrain(steps=2)
