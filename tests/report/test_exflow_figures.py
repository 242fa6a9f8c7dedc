"""Figures of ExFlow: the tables behind them, and what their options change."""

import pandas as pd
import pytest

from repro import paths
from repro.report.figures import base, exflow, exflow_decode, exflow_texts
from repro.report.figures import data as tables
from repro.report.figures.tables import exflow as of

SHIPPED = base.Data(paths.root() / "results/reference/laptop-2core/records")


def placements(**columns):
    fixed = {"method": "affinity", "gpus": 4, "seed": 0, "time_limited": "no", "time_limit_s": 30.0}
    return pd.DataFrame(
        {**{name: [value] * len(next(iter(columns.values()))) for name, value in fixed.items()}, **columns}
    )


def test_methods_come_in_one_order_and_say_that_a_limit_cut_them():
    table = placements(method=["affinity", "exflow", "contiguous", "exflow"], time_limited=["no", "yes", "no", "no"])
    names = [name for name, _, _ in exflow.by_method(table)]
    assert names == [
        "rank order (DeepSpeed-MoE)",
        "paper's integer program (30 s limit hit)",
        "our search, same objective",
    ]


def test_all_tokens_are_as_many_as_the_training_sequences_have():
    table = placements(gpus=[4, 4, 4, 8], train_tokens=[0, 0, 300, 0], tokens_used=["1000", "3000", "300", "900"])
    assert exflow_texts.counted(table).tokens.tolist() == [
        2000,
        2000,
        300,
    ]  # nothing about 8 GPUs, where only all were tried


def test_options_choose_what_is_drawn():
    small = exflow.exflow_hops(SHIPPED, trace="gpt_moe_64e")
    assert small.caption.startswith("GPT-MoE with 64 experts")
    assert [tick.get_text() for tick in small.figure.axes[0].get_xticklabels()] == ["4", "8", "16", "32"]
    assert len(exflow_texts.exflow_domains(SHIPPED, homes={"gptoss20b": "mmlu"}).figure.axes) == 1
    assert exflow_decode.exflow_decode(SHIPPED, experts=32).caption.startswith("32 experts, 8 processes")
    assert "of 16 experts at other rates between nodes: 6.25 Mbit/s" in exflow_decode.exflow_decode(SHIPPED).caption
    with pytest.raises(base.NothingToShow, match="moe_decode run with weights trained, experts 5"):
        exflow_decode.exflow_decode(SHIPPED, experts=5)


def test_runs_on_two_shapes_of_machine_are_never_averaged():
    """Some of those of 8 experts ran on one node: the figure has the shape of most systems, the table a row for each."""
    told = SHIPPED.runs("moe_decode", weights="trained", experts=8, requests=128, system="two_all_to_alls")
    shapes = told[told.placement == "contiguous"].groupby("nodes").tokens_per_s.median()
    assert sorted(shapes.index) == [1, 2]
    center = exflow_decode.exflow_decode(SHIPPED, experts=8).figure.axes[1]
    drawn = [bar.get_width() for bar in center.patches]
    assert shapes[2] in drawn and shapes[1] not in drawn
    rows = of.decoding(SHIPPED).data["tokens/s"].xs("two all-to-alls, nothing padded", level="system")[8]
    assert {nodes: rows[nodes].item() for nodes in (1, 2)} == dict(shapes)


def test_training_on_a_text_that_no_claim_reads_is_drawn_without_claims():
    assert "Black" not in exflow_decode.exflow_training(SHIPPED, text="shakespeare").caption


def test_a_larger_model_of_a_gpu_has_curves_and_numbers_of_its_own():
    """In the results of tier gpu it is alone."""
    alone = base.Data(SHIPPED.folder)
    alone._kept["moe_train"] = {p: run for p, run in SHIPPED._records("moe_train").items() if "-gpu-" in p.name}
    captions = [exflow_decode.exflow_training(data).caption for data in (SHIPPED, alone)]
    assert [caption.count("Black") for caption in captions] == [2, 1]
    larger = "Black, a larger model" + captions[0].split("Black, a larger model")[1]
    assert "121 million" in larger and captions[1].endswith(larger) and "In colours" not in captions[1]


def test_a_placement_alone_has_nothing_to_be_compared_with(monkeypatch):
    monkeypatch.setattr(
        tables,
        "_table",
        lambda found, name: placements(
            trace=["gptoss20b"],
            train_domain=["all"],
            test_domain=["all"],
            max_load_limit=[0],
            bound_s=[0],
            gpus_per_node=[0],
            train_tokens=[0],
        ).assign(older_code=False),
    )
    with pytest.raises(base.NothingToShow, match="rank order and another placement of gptoss20b"):
        exflow.exflow_hops(SHIPPED)
