"""The benchmark of serving: lengths are as its head says, and numbers of a pass are read as they are named."""

import math

import numpy as np
import psutil
import pytest
import serving

from repro.experiments.flover_peers.engines.protocol import Answer, Request, Result
from repro.models.llama import LlamaConfig


@pytest.mark.parametrize("name", serving.WORKLOADS)
def test_requests_fit_the_models_and_are_the_same_each_time(name):
    found = serving.asked(name, 40, 0.5)
    assert found == serving.asked(name, 40, 0.5) != serving.asked(name, 40, 0.5, seed=1)
    assert [request.arrival_s for request in found[:3]] == [0.0, 0.5, 1.0]
    for request in found:
        assert len(request.prompt) >= 1 and request.output_tokens >= 1
        assert len(request.prompt) + request.output_tokens <= serving.POSITIONS
        assert 0 <= min(request.prompt) <= max(request.prompt) < serving.VOCAB


def test_drawn_lengths_have_their_means():
    prompts, answers = serving.mixed(np.random.default_rng(0), 4000)
    assert prompts.min() >= 4 and prompts.max() <= 700 and prompts.mean() == pytest.approx(490, abs=5)
    assert set(answers) == {84}
    prompts, answers = serving.azure_code(np.random.default_rng(0), 4000)
    assert np.median(prompts) == pytest.approx(1500 * serving.SCALE, rel=0.05)
    assert np.median(answers) == pytest.approx(13, rel=0.1)


def test_numbers_of_a_pass_by_hand():
    requests = [Request(0, 0.0, [1], 3), Request(1, 1.0, [1], 2)]
    answers = [Answer(0, 0.0, 0.5, 2.0, [1, 2, 3], 0.9), Answer(1, 1.0, 1.25, 4.0, [1, 2], 2.75)]
    found = serving.numbers(requests, Result("", 0.0, None, answers), 2.0)
    assert (
        found["tokens/s"] == 5 / 4 and found["× bound"] == 2 and found["TTFT mean"] == pytest.approx((0.5 + 0.25) / 2)
    )
    assert found["latency p99"] == pytest.approx(3.0, abs=0.02) and found["gap"] == 2.75
    whole = [Answer(0, 0.0, None, 2.0, [1, 2, 3]), Answer(1, 1.0, None, 4.0, [1, 2])]
    found = serving.numbers(requests, Result("", 0.0, None, whole), math.nan)
    assert math.isnan(found["TTFT mean"]) and math.isnan(found["gap"]) and found["tokens/s"] == 5 / 4
    rows = [{**dict.fromkeys(serving.SETTING, ""), "server": name, "round": 0, **found} for name in ("ours", "other")]
    assert len(serving.shown(rows, "").rows) == 2


def test_what_nobody_can_do_without_by_hand():
    """One layer of width 4, two heads of 2, ffn 8, 10 words: a prompt of 3 tokens and an answer of 2."""
    config = LlamaConfig(layers=1, width=4, heads=2, kv_heads=2, ffn=8, vocab=10)
    done, moved = serving.work(config, [Request(0, 0.0, [1, 2, 3], 2)], fixed=1000, each=10)
    # Keys and values of 4 rows; the rest, and the head, of the 2 rows whose logits are wanted, which see 3 and 4 rows.
    weights = 4 * 4 * 2 * 4 + 2 * (4 * 4 + 4 * 4 + 3 * 8 * 4) + 2 * 10 * 4
    assert done == 2 * weights + 4 * 4 * (3 + 4)
    assert moved == 2 * 1000 + 10 * (3 + 4)
    assert serving.work(config, [Request(n, 0.0, [1, 2, 3], 2) for n in range(5)], 1000, 0) == (5 * done, 2000)


def test_every_pass_is_kept_when_it_is_done(tmp_path):
    for turn in range(2):
        serving.keep(tmp_path / "passes.csv", [{"server": "ours", "round": turn}])
    assert (tmp_path / "passes.csv").read_text().split() == ["server,round", "ours,0", "ours,1"]


def test_busy_processes_run_beside_and_are_gone_after():
    before = {child.pid for child in psutil.Process().children()}
    with serving.busy(2):
        beside = [child for child in psutil.Process().children() if child.pid not in before]
        assert len(beside) == 2 and all(child.status() != psutil.STATUS_ZOMBIE for child in beside)
    assert not any(child.is_running() for child in beside)
