"""The experiment: what it reports, with and without the emulated network."""

import subprocess
import sys

import pytest

from repro import experiments
from repro.emulate import netns
from repro.experiments.zero_train import ZeroTrain
from repro.experiments.zero_train import run as training
from repro.experiments.zero_train.plans import plan_of
from repro.quantize import payload_bytes
from repro.records import record
from repro.scaling.step import activations, layout_of
from repro.zero import memory as bytes_of

pytestmark = pytest.mark.xdist_group("network")
TINY = {"layers": 1, "hidden": 32, "heads": 2, "seq_len": 8, "steps": 4, "packages": 1}
METRICS = {
    *("step_seconds", "loss_first", "loss_last", "model_bytes", "parameters"),
    *("bytes_package", "bytes_node", "bytes_cluster", "state_bytes_per_rank", "predicted_state_bytes_per_rank"),
    *("tflops_per_rank", "compute_seconds"),
}
LIBRARIES = ["deepspeed_zero3", "deepspeed_zeropp", "fsdp2", "fsdp2_hsdp", "fsdp2_reshard"]


@pytest.mark.parametrize("plan", ["hierarchical", "zeropp"])
def test_unshaped_run(plan):
    outcome = experiments.get("zero_train").run(ZeroTrain(plan=plan, fabric="unshaped", accumulation=2, **TINY))
    values = outcome.metrics.model_dump(exclude_none=True)
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


def test_a_predicted_step_has_its_compute_and_the_bytes_of_every_micro_batch(monkeypatch):
    honest = training._metrics
    monkeypatch.setattr(training, "_metrics", lambda *of, **named: honest(*of[:4], True))  # as if links were shaped
    point = ZeroTrain(fabric="unshaped", accumulation=3, **TINY)
    found = experiments.get("zero_train").run(point).metrics
    sent, outermost = found.bytes_cluster / point.shape.ranks, point.topology.levels[-1]
    least = found.compute_seconds + sent / outermost.bytes_per_s
    assert found.bytes_cluster > 0 and least <= found.predicted_step_seconds < 3 * least


@pytest.fixture(scope="module")
def smallest():
    """What the smallest plan measures."""
    return _run(**TINY).metrics


def test_bytes_of_the_smallest_plan_by_hand(smallest):
    """4 ranks, 2 nodes of one pair: a quarter of each of two buckets in INT8 and INT4 across nodes."""
    block = 12 * 32 * 32 + 13 * 32
    buckets = (block, int(smallest.parameters) - block)
    expected = sum(4 * payload_bytes(numel // 4, bits, 256) for numel in buckets for bits in (8, 4))
    assert smallest.bytes_cluster == expected


@pytest.mark.root
@pytest.mark.skipif(netns.unavailable() is not None, reason=f"no emulated network: {netns.unavailable()}")
@pytest.mark.parametrize("plan", ["zero3", "zeropp", "hierarchical"])
def test_ledger_and_kernel_counters_agree_within_three_percent(plan):
    """The kernel also counts TCP, IP and Ethernet headers, acknowledgements and barriers."""
    outcome = experiments.get("zero_train").run(ZeroTrain(plan=plan, steps=4))
    assert outcome.evidence == "emulated" and outcome.conditions == {"fabric": "shaped"}
    values = outcome.metrics.model_dump()
    assert values["predicted_step_seconds"] > 0
    for level in ("package", "node", "cluster"):
        ratio = values[f"wire_{level}"] / values[f"bytes_{level}"]
        assert 1 < ratio < 1.03, level


def _run(**settings):
    return experiments.get("zero_train").run(ZeroTrain(fabric="unshaped", **settings))


LEARNING = {**TINY, "hidden": 64, "dtype": "float32", "lr": 1e-2, "lr_warmup": 1, "steps": 5}


@pytest.fixture(scope="module")
def ddp_losses() -> list[float]:
    found = _run(plan="ddp", **LEARNING).series.loss.tolist()
    assert found[-1] < found[0] - 0.1, "the tests below must learn"
    return found


@pytest.mark.parametrize("plan", LIBRARIES)
def test_libraries_train_the_same_model_on_the_same_data(plan, ddp_losses):
    """Our DDP sends gradients in 16 bits; test_exactness and the tests of the baselines compare in 32."""
    found = _run(plan=plan, **LEARNING)
    assert found.series.loss.tolist() == pytest.approx(ddp_losses, rel=2e-2 if plan == "deepspeed_zeropp" else 2e-3)
    assert found.metrics.with_units().keys() == METRICS - {
        *("bytes_package", "bytes_node", "bytes_cluster", "predicted_state_bytes_per_rank")
    }
    assert found.metrics.state_bytes_per_rank > 0


@pytest.mark.exhaustive
def test_a_large_model_is_made_real_in_parts_and_is_the_same_under_every_system(monkeypatch):
    """As the 10 and 20 billion parameters of tier cluster are; no compute time is then measured alone."""
    monkeypatch.setattr(training, "LARGE_PARAMETERS", 0)
    found = [_run(plan=plan, **LEARNING) for plan in ("zero3", "fsdp2", "deepspeed_zero3")]
    ours, *libraries = (outcome.series.loss.tolist() for outcome in found)
    for losses in libraries:
        assert losses == pytest.approx(ours, rel=2e-3)
    assert found[0].metrics.compute_seconds is None


def test_learning_rate_rises_over_the_first_steps():
    """With a warm-up of 2 steps, the first is at half the rate and the second at the whole."""

    def losses(**settings):
        point = ZeroTrain(plan="ddp", nodes=1, gcds=2, fabric="unshaped", **TINY, **settings)
        return experiments.get("zero_train").run(point).series.loss.tolist()

    constant, rising = losses(lr=1e-2, lr_warmup=1), losses(lr=2e-2, lr_warmup=2)
    assert constant[:2] == rising[:2]  # after one step at 1e-2
    assert constant[2:] != rising[2:]  # then 1e-2 again against 2e-2


def test_points():
    assert ZeroTrain(nodes=3, packages=4, gcds=2).shape.ranks == 24
    assert ZeroTrain(plan="ddp").label.startswith("ddp-2x2x2")
    with pytest.raises(ValueError, match="greater than or equal to 3"):
        ZeroTrain(steps=2)
    with pytest.raises(ValueError, match="weight_bits can only be changed with plan hierarchical, found zeropp"):
        ZeroTrain(plan="zeropp", weight_bits=16)
    with pytest.raises(ValueError, match="weights over cluster, gradients over node: gradients need a level"):
        ZeroTrain(weights="cluster", gradients="node")
    with pytest.raises(ValueError, match="settings of our engine, found plan fsdp2"):
        ZeroTrain(plan="fsdp2", block=64)
    with pytest.raises(ValueError, match="secondary over node, weights over node: secondary needs a level below"):
        ZeroTrain(weights="node", secondary="node")
    with pytest.raises(ValueError, match="hidden 384 is not divisible by 5 heads"):
        ZeroTrain(heads=5)
    with pytest.raises(ValueError, match="fsdp2_hsdp needs several nodes of several ranks, found 1x2x2"):
        ZeroTrain(plan="fsdp2_hsdp", nodes=1)


def test_memory_of_a_large_point_is_predicted():
    large = {"layers": 44, "hidden": 6144, "heads": 64, "seq_len": 2048, "vocab": 50432, "checkpointing": True}
    memory, point = experiments.get("zero_train").memory, ZeroTrain(nodes=48, packages=4, **large)
    model, chosen = layout_of(point.gpt), plan_of(point)
    states = sum(bytes_of.predict(chosen, model).values())
    assert states == pytest.approx(26.35e9, rel=1e-3)
    assert memory(point) == states + bytes_of.working(chosen, model) + activations(point.gpt)
    assert memory(ZeroTrain(plan="fsdp2", **large)) is None


def test_changes_to_the_hierarchical_plan_change_what_is_sent(smallest):
    assert _run(**TINY, weight_bits=16).metrics.bytes_package > smallest.bytes_package
    assert _run(**TINY, gradient_bits="4,16,16").metrics.bytes_cluster > smallest.bytes_cluster
    assert _run(**TINY, block=0).metrics.bytes_cluster < smallest.bytes_cluster  # hardly any scales


def test_a_job_of_torchrun_trains_over_its_own_network_and_one_rank_writes(tmp_path):
    """What a cluster runs: every rank calls `repro run`."""
    record_file = tmp_path / "record.json"
    small = {key: value for key, value in TINY.items()} | {"nodes": 1, "gcds": 2}
    settings = [text for key, value in small.items() for text in ("--set", f"{key}={value}")]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "repro", "run", "zero_train", *settings, "--out", str(record_file)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = record.read(record_file)
    assert (found.status, found.evidence, found.conditions) == ("ok", "measured", {"fabric": "the machine's own"})
    assert found.metrics["bytes_package"].value > 0
