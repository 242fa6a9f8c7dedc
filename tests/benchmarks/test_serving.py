"""The benchmark of serving: lengths are as its head says, and numbers of a pass are read as they are named."""

import math

import numpy as np
import pytest
import serving

from repro.experiments.flover_peers.engines.protocol import Answer, Request, Result


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
    found = serving.numbers(requests, Result("", 0.0, None, answers))
    assert found["tokens/s"] == 5 / 4 and found["TTFT mean"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["latency p99"] == pytest.approx(3.0, abs=0.02) and found["gap"] == 2.75
    whole = [Answer(0, 0.0, None, 2.0, [1, 2, 3]), Answer(1, 1.0, None, 4.0, [1, 2])]
    found = serving.numbers(requests, Result("", 0.0, None, whole))
    assert math.isnan(found["TTFT mean"]) and math.isnan(found["gap"]) and found["tokens/s"] == 5 / 4
    rows = [{"server": name, "round": 0, **found} for name in ("ours", "other")]
    assert len(serving.shown(rows, "").rows) == 2
