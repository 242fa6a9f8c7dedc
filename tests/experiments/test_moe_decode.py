"""The decoding experiment: its points, and that a run on real ranks says what it measured."""

import pytest
from pydantic import ValidationError

from repro import experiments
from repro.experiments.moe_decode import MoEDecodePoint

SMALL = {"weights": "random", "experts": 4, "layers": 3, "hidden": 16, "heads": 2, "expert_hidden": 8, "packages": 1}
SMALL |= {"requests": 3, "prompt": 5, "new_tokens": 5, "fabric": "unshaped", "profile_tokens": 256}
RANKS = 4


def run(**values):
    experiment = experiments.get("moe_decode")
    return experiment.check(experiment.run(MoEDecodePoint(**SMALL | values)))


@pytest.mark.parametrize(
    "values",
    [
        {"system": "two_all_to_alls", "top_k": 2},
        {"keys_values": "shared", "placement": "affinity"},
        {"keys_values": "gathered", "placement": "exflow", "kv_heads": 1},
        {"system": "two_all_to_alls", "placement": "eplb", "extra_slots": 1},
        {"keys_values": "shared", "placement": "joint", "extra_slots": 2},
    ],
)
def test_a_run_reports_tokens_times_and_bytes(values):
    found = run(**values)
    metrics = found.metrics.model_dump(exclude_none=True)
    assert metrics["tokens_equal"] == 1
    assert found.evidence == "measured" and found.conditions["fabric"].startswith("unshaped")
    assert metrics["tokens_per_s"] == pytest.approx(RANKS * 3 / metrics["iteration_seconds"])
    assert metrics["bytes"] == pytest.approx(
        sum(v for name, v in metrics.items() if name[:6] == "bytes_" and name[6:] in ("package", "node", "cluster"))
    )
    assert metrics["bytes_all_to_all"] > 0
    assert (metrics["bytes_all_gather_kv"] > 0) == (values.get("keys_values") == "gathered")
    assert 1 <= metrics["max_load"] <= RANKS
    assert 0 <= metrics["leaving_node_fraction"] <= metrics["leaving_fraction"] <= 1
    assert metrics["routing_seconds"] == pytest.approx(
        sum(metrics[f"seconds_{part}"] for part in ("all_to_all", "all_to_all_parts", "all_gather", "all_gather_kv"))
    )
    series = found.series
    for aligned, share in ((True, "all_to_all_share"), (False, "all_to_all_share_waiting")):
        rows = series[series.aligned == aligned].drop(columns=["rank", "iteration", "aligned"]).sum()
        spent = rows.get("all_to_all", 0) + rows.get("all_to_all_parts", 0)
        assert metrics[share] == pytest.approx(spent / (rows.seconds - rows.get("wait", 0))) and 0 < metrics[share] < 1
    assert set(series["rank"]) == set(range(RANKS)) and set(series.aligned) == {False, True}


def test_the_shortest_run_has_an_iteration_to_time():
    assert run(new_tokens=4).metrics.iteration_seconds > 0


def test_deepspeed_decodes_the_same_tokens():
    pytest.importorskip("deepspeed")
    metrics = run(system="deepspeed").metrics
    assert metrics.tokens_equal == 1 and metrics.bytes_all_to_all > 0


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"experts": 6}, "experts is 6: 8 ranks cannot share them evenly"),
        ({"new_tokens": 3}, "greater than or equal to 4"),  # the first by its prompt, two to warm up
        ({"hidden": 32}, "hidden: sizes of a model with random weights, found weights trained"),
        ({"system": "deepspeed", "placement": "affinity"}, "placement is affinity: deepspeed places in rank order"),
        ({"extra_slots": 1, "placement": "affinity"}, "extra_slots is 1: only placements eplb and joint copy experts"),
        ({"extra_slots": 15, "placement": "joint"}, "extra_slots is 15, allowed: 0 to 14"),
        ({"system": "two_all_to_alls", "keys_values": "shared"}, "keys_values is shared: only system coherent"),
        ({"weights": "random", "experts": 8, "top_k": 9}, "top_k is 9, allowed: 1 to 8"),
    ],
)
def test_points_that_contradict_themselves_are_refused(values, says):
    with pytest.raises(ValidationError, match=says):
        MoEDecodePoint(**values)
