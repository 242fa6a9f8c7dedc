"""What each change gives over DeepSpeed-MoE: pairs of one occasion, and the number of the claim."""

from datetime import timedelta

import pytest
from attack.record_files import shipped

from repro.claims import registry
from repro.experiments import stored
from repro.report.figures import base, exflow_decode

SETTING = {"experts": 16, "nodes": 2, "packages": 2, "gcds": 2, "cluster_mbit_s": 25}


@pytest.fixture
def made_later(monkeypatch):
    """The shipped runs, those that `later` names begun two days after."""
    every = stored.collect(shipped("moe_decode")[0].parent).records

    def change(later):
        records = {}
        for path, run in every.items():
            begun = {"start": run.provenance.start + timedelta(days=2)} if later(run) else {}
            records[path] = run.model_copy(update={"provenance": run.provenance.model_copy(update=begun)})
        monkeypatch.setattr(base.Data, "_records", lambda self, experiment: records)
        return records

    return change


def data():
    return base.Data(shipped("moe_decode")[0].parents[1])


def test_the_whole_is_the_number_of_the_claim(made_later):
    records = made_later(lambda run: run.repeat % 2)
    found = exflow_decode.against_deepspeed(data(), SETTING, "iteration_seconds")
    claims = [claim for claim in registry.load() if claim.id in ("EX-E2E.b", "EX-E2E.f")]
    assert [found[step].value for step in (3, 4)] == pytest.approx(
        [verdict.value for verdict in registry.evaluate(claims, records)]
    )
    assert len(set(found[3].occasions)) > 1  # runs of one repeat were made together, other repeats two days later


def test_runs_of_two_days_are_no_pair(made_later):
    made_later(lambda run: run.point["system"] == "deepspeed")
    assert not exflow_decode.against_deepspeed(data(), SETTING, "iteration_seconds")
    with pytest.raises(base.NothingToShow, match="No occasion of moe_decode has DeepSpeed's layers and placed experts"):
        exflow_decode.exflow_gain(data())


def test_what_steps_give_multiplies_to_the_whole():
    drawing = exflow_decode.exflow_gain(data())
    axes = next(axes for axes in drawing.figure.axes if axes.get_title().startswith("16 experts, 8 ranks, 25 Mbit/s"))
    first, second, third, _ = (float(number[1:]) for text in axes.texts if (number := text.get_text()).startswith("×"))
    found = exflow_decode.against_deepspeed(data(), SETTING, "iteration_seconds")
    assert first * second * third == pytest.approx(found[3].value, rel=0.02)  # printed to two digits
    padded = [{path for path, run in found[n].runs.items() if run.point["system"] == "deepspeed"} for n in (1, 2, 3)]
    assert padded[0] == padded[1] == padded[2] != set(), "each step against the same runs"
