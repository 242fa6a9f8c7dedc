"""Parts of the shipped traces: never of the same sequence, and of the domain that was asked for."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from repro import exflow
from repro.experiments.common.sequences import ratio_interval
from repro.experiments.common.trace_files import open_trace
from repro.experiments.common.traces import DOMAINS, domains, experts
from repro.experiments.exflow_affinity import AffinityPoint
from repro.experiments.exflow_affinity import run as exflow_affinity
from repro.experiments.exflow_placement import PlacementPoint
from repro.experiments.exflow_placement import run as exflow_placement
from repro.experiments.exflow_serving import ServingPoint
from repro.experiments.exflow_serving import run as exflow_serving


@pytest.fixture(scope="module", params=["gptoss20b", "gpt_moe_16e", "gpt_moe_16e_shakespeare"])
def opened(request):
    return request.param, open_trace(request.param, seed=1)


def test_every_domain_has_tokens_to_place_by_and_others_to_judge_on(opened):
    name, source = opened
    whole = source.parts()
    assert sum(part.tokens for part in whole) == source.trace.tokens and source.trace.num_experts == experts(name)
    for domain in set(domains(name)) - {"all"}:
        train, held_out = source.parts(domain, domain)
        assert train.tokens > 500 and held_out.tokens > 500
        assert not set(train.sequences) & set(held_out.sequences)
        assert set(train.sequences) <= set(whole[0].sequences) and set(held_out.sequences) <= set(whole[1].sequences)


def test_domains_do_not_overlap(opened):
    name, source = opened
    counted = np.sum([source.of(domain) for domain in domains(name) if domain != "all"], axis=0)
    assert counted.max() == 1 and source.of("all").all()


def test_parts_of_one_benchmark_are_one_domain():
    source = open_trace("gptoss20b", seed=0)
    assert set(DOMAINS["gptoss20b"]) - {"all"} < set(source.domain)
    assert source.of("mmlu").sum() == 15_161 + 40_156 + 24_502  # development, test, validation (data/README.md)


def test_what_is_resampled_is_an_answer_or_a_piece_of_one_text(opened):
    name, source = opened
    _, held_out = source.parts()
    tokens = source.resampled(held_out)
    assert len(tokens) == held_out.tokens and (tokens.sequence == held_out.sequences).all()
    together = tokens.groupby("unit").agg({"sequence": "nunique", "stratum": "nunique"})
    assert together.stratum.max() == 1
    if name == "gptoss20b":
        assert set(tokens.stratum) == {""} and together.sequence.max() == 1
    else:
        assert set(tokens.stratum) == {"shakespeare", "python"} and set(together.sequence) == {8}


def test_a_placement_is_counted_sequence_by_sequence():
    outcome = exflow_placement.run(PlacementPoint(method="contiguous", gpus=8, gpus_per_node=4, train_tokens=100))
    sums = outcome.series[["transitions", "crossings", "node_crossings"]].sum()
    assert sums.crossings / sums.transitions == pytest.approx(outcome.metrics.crossing_fraction)
    assert sums.node_crossings / sums.transitions == pytest.approx(outcome.metrics.node_crossing_fraction)
    assert sums.transitions * 7 / 8 == pytest.approx(outcome.series.random_crossings.sum())
    assert outcome.series.sequence.is_unique and len(outcome.series) > 100


def test_a_cut_of_the_first_of_two_searches_is_told(monkeypatch):
    place, point = exflow.place, ServingPoint(trace="gpt_moe_8e", gpus=2, gpus_per_node=2, objective="gpus", tokens=100)
    for cut, told in ((True, "yes"), (False, "no")):
        monkeypatch.setattr(exflow, "place", lambda *args, cut=cut: replace(place(*args), time_limited=cut))
        assert exflow_serving.run(point).conditions["time_limited"] == told


def test_affinity_has_an_interval_over_sequences():
    outcome = exflow_affinity.run(AffinityPoint(trace="gpt_moe_8e", tokens=5000))
    metrics, units = outcome.metrics, outcome.series[outcome.series.kind == "unit"]
    low, value, high = (getattr(metrics, f"unbiased_mutual_information{end}") for end in ("_low", "", "_high"))
    assert low < value < high < metrics.mutual_information + 0.1 and value < metrics.mutual_information
    sums = units[["information", "shuffled_information"]].to_numpy()
    of_series = ratio_interval(sums, units.stratum.to_numpy())
    expected = np.array([value, low, high]) / metrics.mutual_information_shuffled
    assert len(units) == 128 and of_series == pytest.approx(expected, rel=0.03)
    assert metrics.unbiased_normalized_mutual_information < metrics.normalized_mutual_information


def test_the_control_of_affinity_is_known_better_than_one_draw_tells():
    """What all tokens share is divided by it in every sequence, so that no interval over sequences shows its error."""
    found = [
        exflow_affinity.run(
            AffinityPoint(trace="gpt_moe_8e", tokens=20000, seed=seed)
        ).metrics.mutual_information_shuffled
        for seed in range(4)
    ]
    assert max(found) / min(found) < 1.05  # of one draw each 1.2


@pytest.mark.parametrize(
    ("point", "values", "says"),
    [
        (AffinityPoint, {"domain": "python"}, "domain is 'python': gptoss20b has all, mmlu"),
        (PlacementPoint, {"trace": "gpt_moe_8e", "test_domain": "mmlu"}, "gpt_moe_8e has all, shakespeare, python"),
        (PlacementPoint, {"trace": "gpt_moe_8e", "gpus": 16}, "8 experts cannot be shared evenly; allowed: 1, 2, 4, 8"),
        (PlacementPoint, {"max_load_limit": 0.5}, "max_load_limit is 0.5: at least 1"),
        (PlacementPoint, {"max_load_limit": 1.5, "method": "exflow"}, "only with method affinity, found exflow"),
    ],
)
def test_points_that_no_trace_has_are_refused(point, values, says):
    with pytest.raises(ValidationError, match=says):
        point(**values)
