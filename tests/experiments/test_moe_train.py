"""Training a GPT-MoE: what is measured while it trains agrees with repro.exflow, and is what its names say."""

import itertools
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from repro import exflow, experiments, paths
from repro.exflow.recording import record_routing
from repro.exflow.trace import Trace
from repro.experiments.common.texts import FILES, read, windows
from repro.experiments.moe_train import MoeTrain
from repro.experiments.moe_train.routing import Routed, join, measure, route, stay
from repro.experiments.moe_train.run import batches, stay_over_time
from repro.models import gpt_moe_checkpoint as checkpoint
from repro.models.gpt_moe import GPTMoE, GPTMoEConfig
from repro.records import record

TINY = {"experts": 4, "layers": 3, "hidden": 16, "heads": 2, "expert_hidden": 16, "batch": 4, "seq_len": 16}
TINY |= {"eval_tokens": 512, "lr_warmup": 5, "lr": 1e-2}
MEASURED = [
    *("loss", "mutual_information", "normalized_mutual_information", "stay"),
    *("mutual_information_shuffled", "normalized_mutual_information_shuffled", "stay_shuffled", "busiest", "evenness"),
]


def model(**changes):
    torch.manual_seed(0)
    sizes = {"layers": 4, "hidden": 32, "heads": 2, "seq_len": 16, "experts": 5, "expert_hidden": 8, "balance": 0.0}
    made = GPTMoE(GPTMoEConfig(**sizes | changes))
    for block in made.blocks:
        torch.nn.init.normal_(block.router.weight)  # choices that differ between tokens
    return made


def sequences(count=70, seed=0):
    return torch.randint(256, (count, 17), generator=torch.Generator().manual_seed(seed))


def routed(experts, num_experts):
    return Routed(Trace(np.asarray(experts), num_experts), 0.0)


@pytest.mark.parametrize("top_k", [1, 2])
def test_routes_and_loss_are_the_recorded_ones(top_k):
    moe, rows = model(top_k=top_k), sequences()
    found = route(moe, rows)
    with record_routing(moe) as recording:
        loss = moe(rows[:, :-1], rows[:, 1:]).item()
    np.testing.assert_array_equal(found.trace.experts, recording.trace().top(1).experts)
    assert found.loss == pytest.approx(loss, rel=1e-5) and found.trace.num_experts == 5
    assert not any(block.router._forward_hooks for block in moe.blocks)


def test_what_stays_is_what_the_placement_search_finds_with_one_expert_a_gpu():
    """Counted on other tokens than it was placed by."""
    rng = np.random.default_rng(0)
    known, other = (rng.gamma(0.3, 100.0, (3, 6, 6)).astype(int) + 1 for _ in range(2))
    placement = exflow.place(known.astype(float), gpus=6)
    for counts in (known, other):
        crossing = exflow.evaluate(placement, counts.astype(float)).crossing_fraction
        assert stay(known, counts) == pytest.approx(1 - crossing)


def test_a_chain_of_permutations_has_all_the_affinity_there_is():
    """And the control has none: what is left of it is the bias of the estimates."""
    first = np.arange(8000) % 8
    experts = np.stack([first, (first + 3) % 8, (first * 5) % 8], axis=1)
    found = measure(routed(experts[:4000], 8), routed(experts[4000:], 8), seed=0)
    assert found["stay"] == 1 and found["mutual_information"] == pytest.approx(3)
    assert found["normalized_mutual_information"] == pytest.approx(1)
    assert found["stay_shuffled"] == pytest.approx(1 / 8, abs=0.03) and found["mutual_information_shuffled"] < 0.02
    assert found["busiest"] == pytest.approx(1) and found["evenness"] == pytest.approx(1)


def test_one_expert_that_takes_everything_looks_like_affinity_and_the_control_tells():
    found = measure(routed(np.zeros((50, 3), int), 4), routed(np.zeros((50, 3), int), 4), seed=0)
    assert found["stay"] == found["stay_shuffled"] == 1
    assert found["mutual_information"] == found["normalized_mutual_information"] == 0
    assert (found["busiest"], found["evenness"]) == (4, 0)


def test_shuffling_keeps_the_load_of_every_layer():
    one = routed(np.random.default_rng(0).integers(5, size=(100, 4)), 5)
    other = one.shuffled(np.random.default_rng(1))
    np.testing.assert_array_equal(one.loads, other.loads)
    assert (one.trace.experts != other.trace.experts).any() and one.loads.sum() == pytest.approx(4)


def test_joined_texts_weigh_by_their_tokens():
    parts = [Routed(Trace(np.full(size, value), 2), loss) for size, value, loss in (((1, 2), 0, 1.0), ((3, 2), 1, 5.0))]
    both = join(parts)
    assert both.loss == 4 and both.trace.experts.tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_the_last_tenth_of_a_text_is_held_out(name):
    text = read(name)
    whole = torch.cat([text.train, text.held_out])
    assert bytes(whole.numpy()) == paths.data(FILES[name]).read_bytes()
    assert len(text.held_out) == pytest.approx(0.1 * len(whole), abs=1)


def test_windows_are_spread_over_a_text_without_overlap():
    text = torch.arange(200, dtype=torch.uint8)
    found = windows(text, tokens=60, length=10)
    assert found.shape == (6, 11) and found.dtype == torch.int64
    assert (found.diff(dim=1) == 1).all()  # neighbouring bytes
    assert found[0, 0] == 0 and found[-1, -1] == 199 and found[:, 0].diff().min() >= 11
    with pytest.raises(ValueError, match="10 bytes has no sequence of seq_len 10"):
        windows(text[:10], tokens=60, length=10)


def test_batches_take_every_place_of_every_text_as_often():
    texts = [torch.arange(0, 21, dtype=torch.uint8), torch.arange(100, 221, dtype=torch.uint8)]
    rows = torch.cat(list(itertools.islice(batches(texts, rows=50, length=20, seed=0), 60)))
    assert (rows.diff(dim=1) == 1).all() and rows.shape == (3000, 21)
    short = rows[:, 0] < 21
    assert short.float().mean() == pytest.approx(0.5, abs=0.05)
    assert rows[short, 0].unique().tolist() == [0]  # the only place where 21 bytes fit
    assert rows[~short, 0].unique().tolist() == list(range(100, 201))


# --- experiment ------------------------------------------------------------------------------------------------------


def run(**changes):
    experiment = experiments.get("moe_train")
    return experiment.check(experiment.run(MoeTrain(**TINY | changes)))


def test_what_a_run_reports():
    outcome = run(iterations=60, text="shakespeare")
    assert outcome.evidence == "measured"
    assert outcome.series.columns.tolist() == ["iteration", "domain", *MEASURED]
    assert outcome.series.iteration.unique().tolist() == [0, 10, 20, 50, 60]
    assert outcome.series.domain.tolist() == ["shakespeare", "python", "both"] * 5
    own = outcome.series[outcome.series.domain == "shakespeare"].set_index("iteration")
    value = outcome.metrics.model_dump(exclude_none=True)
    assert set(value) == {f"{name}_end" for name in MEASURED} | {"parameters", "stay_start", "stay_peak"}
    assert all(value[f"{name}_end"] == own.loc[60, name] for name in MEASURED)
    assert value["stay_start"] == own.stay[0] and value["stay_peak"] == own.stay[1:].max()
    assert own.loss[0] == pytest.approx(np.log(256), abs=0.1) and own.loss[60] < 3.5
    python = outcome.series[outcome.series.domain == "python"]
    assert python.loss.iloc[-1] > own.loss[60] + 0.1  # was not trained on


def test_a_longer_run_begins_as_a_shorter_one():
    """Nothing in training depends on how many iterations follow; evaluating draws no numbers that training needs."""
    short, long = (run(iterations=n).series for n in (10, 20))
    assert long[long.iteration <= 10].equals(short)
    assert not run(iterations=10, seed=1).series.loss.equals(short.loss)


def test_moments_of_the_claim():
    stay = pd.Series({0: 0.2, 10: 0.9, 20: 0.4, 30: 0.5, 40: 0.1})
    assert stay_over_time(stay, early=10, late=30) == {"stay_start": 0.2, "stay_peak": 0.9, "stay_low": 0.4}
    assert stay_over_time(stay, early=10, late=50)["stay_low"] is None


def test_every_thousandth_iteration_is_evaluated():
    assert MoeTrain(iterations=4500).evaluated[-6:] == [1000, 1500, 2000, 3000, 4000, 4500]
    assert {200, 2000} <= set(MoeTrain(iterations=2000).evaluated)


def test_the_balance_loss_spreads_tokens():
    def evenness(balance):
        return run(iterations=150, balance=balance, seed=2).metrics.evenness_end

    assert evenness(1.0) > 0.9 > 0.8 > evenness(0.0)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        run(iterations=1, threads=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"heads": 3}, "hidden 64 is not divisible by 3 heads"),
        ({"top_k": 9}, "top_k is 9, allowed: 1 to 8"),
        ({"text": "prose"}, "shakespeare"),
        ({"iterations": 0}, "greater than or equal to 1"),
    ],
)
def test_points_that_cannot_be(wrong, says):
    with pytest.raises(ValueError, match=says):
        MoeTrain(**wrong)


def test_label_tells_the_runs_apart():
    names = [MoeTrain(**p).label for p in ({}, {"experts": 16}, {"text": "python"}, {"seed": 1}, {"iterations": 5})]
    assert len(set(names)) == 5 and names[0] == "8e-top1-both-4000it-seed0"


def test_loss_of_a_uniform_model_is_the_logarithm_of_the_vocabulary():
    moe = model()
    torch.nn.init.zeros_(moe.head.weight)
    assert route(moe, sequences()).loss == pytest.approx(float(F.cross_entropy(torch.zeros(1, 256), torch.tensor([3]))))


def test_the_script_keeps_weights_trace_and_record_of_one_run(tmp_path):
    weights, trace = tmp_path / "model.safetensors", tmp_path / "routing.npz"
    settings = [word for name, value in (TINY | {"iterations": 12}).items() for word in ("--set", f"{name}={value}")]
    script = [
        sys.executable,
        paths.root() / "benchmarks/inputs/gpt_moe.py",
        weights,
        trace,
        *settings,
        "--records",
        tmp_path,
    ]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    (run_file,) = (tmp_path / "moe_train").glob("*.json")
    found = record.read(run_file)
    model, recorded = checkpoint.load(weights), exflow.load_trace(trace)
    assert found.status == "ok" and found.point["iterations"] == 12
    assert found.metrics["parameters"].value == sum(p.numel() for p in model.parameters())
    assert recorded.experts.shape[:2] == (4 * 512, 3) and recorded.num_experts == 4  # two texts, two parts
    with np.load(trace) as file:
        part = file["held_out"] & (file["domain"] == 1)
    sequences = windows(read("python").held_out, 512, 16)
    choices = recorded.experts.reshape(len(part), 16, 3)[part].reshape(-1, 3)
    assert (route(model, sequences).trace.experts == choices).mean() > 0.99
    assert f"'python': {route(model, sequences).loss:.3f}" in done.stdout.split("as saved")[1]
