"""Figures of the scaling model from the shipped records: they show the records' numbers, and what is claimed of them."""

import numpy as np
import pytest

from repro import paths
from repro.claims import registry
from repro.report import figures
from repro.report.figures import base
from repro.report.figures import data as tables
from repro.report.figures.scaling import inference, maps, marks, training

DATA = base.Data(paths.root() / "results/reference/laptop-2core/records")


def most_draws(runs):
    return runs[runs.draws == runs.draws.max()]


def test_totals_of_fused_and_instances_stand_beside_the_papers():
    drawing, runs = inference.scaling_requests(DATA), DATA.runs("scaling_serving").sort_values(["model", "requests"])
    runs = runs.drop_duplicates("model", keep="last")  # the run of the most requests
    for axes, run in zip(drawing.figure.axes, runs.itertuples(), strict=True):
        instances, fused, flover, transformer = axes.lines
        assert (fused.get_ydata()[-1], instances.get_ydata()[-1]) == (run.seconds_fused, run.seconds_instances)
        assert len(flover.get_xdata()) == 6 and set(transformer.get_xdata()) == set(flover.get_xdata())
        assert axes.get_title().startswith(inference.PAPERS_MODELS[run.model])


def test_how_far_instances_are_from_the_papers_bars_is_said():
    """The bar of LLaMA-13B at 32 requests has two readings in the data; they count as their mean."""
    runs, bars = DATA.runs("scaling_serving", model="llama-13b"), {8: 43.7, 16: 101, 32: (286 + 291) / 2}
    ours = tables.series(runs.nlargest(1, "requests")).set_index("requests").seconds_instances
    words = ", ".join(f"{ours[count] / bars[count]:.2f}" for count in (32, 16, 8))
    caption = inference.scaling_requests(DATA).caption
    assert f"LLaMA-13B {words};" in caption and "286 and 291 s" in caption


def test_what_claims_of_experts_read_is_ringed():
    claims = [claim for claim in registry.load() if claim.id in figures.entry("scaling_experts").claims]
    axes = base.draw("scaling_experts", DATA.folder).axes
    rings = [line.get_ydata() for panel in axes for line in panel.lines if line.get_markersize() == 10]
    read = [DATA.of_claim(claim.id).value for claim in claims]
    assert np.allclose(np.sort(np.concatenate(rings)), np.sort(read)) and len(read) == 6


def test_what_few_and_many_tokens_give_stands_beside_what_is_drawn():
    panel = base.draw("scaling_experts", DATA.folder).axes[0]
    drawn = {line.get_marker(): line.get_ydata() for line in panel.lines if line.get_markersize() == 3}
    assert drawn.keys() == {"v", "^"}
    for marker, tokens in (("v", 16), ("^", 512)):
        runs = DATA.runs("scaling_decode", tokens_per_gpu=tokens)
        assert set(drawn[marker]) <= set(runs.speedup_over_deepspeed_dropping), "of the last series of this panel"


def test_parameters_have_names_in_words():
    table = tables.series(DATA.runs("scaling_train", hardware="frontier")).query("kind == 'tornado'")
    assert {name.replace("_", " ") for name in table.parameter} <= marks.WORDS.keys()


def test_hollow_marks_are_explained_where_there_are_some():
    drawing = training.scaling_changes(DATA)
    hollow = [line for axes in drawing.figure.axes for line in axes.lines if line.get_markerfacecolor() == "white"]
    assert bool(hollow) == ("hollow" in drawing.caption)


def test_only_plans_that_fit_are_drawn():
    """The hierarchical plan of 20 billion parameters needs more than one node of Frontier."""
    top = training.scaling_gcds(DATA, plans=["zero3", "hierarchical"]).figure.axes[0]
    first = {line.get_label(): line.get_xdata()[0] for line in top.lines}
    assert first == {"ZeRO-3": 8, "hierarchical": 16}


def test_a_model_without_records_is_told():
    for draw in (training.scaling_gcds, training.scaling_changes, training.scaling_tornado):
        with pytest.raises(base.NothingToShow, match="gpt-1b"):
            draw(DATA, model="gpt-1b")


@pytest.mark.parametrize("name", ["collectives", "plans"])
def test_hollow_points_are_those_that_were_not_fitted(name):
    panel = base.function(f"scaling_{name}")(DATA).figure.axes[0]
    markers = [line for line in panel.lines if line.get_linestyle() == "None"]
    count = {
        fill: sum(len(line.get_xdata()) for line in markers if line.get_fillstyle() == fill)
        for fill in ("full", "none")
    }
    experiment, flag = {"collectives": ("scaling_network", "part"), "plans": ("scaling_step", "calibrated")}[name]
    runs = DATA.runs(experiment)
    first = (runs.source == "a100_dgx") & (runs.split == "ranks") if name == "collectives" else runs.plans == "all"
    rows = tables.series(runs[first])
    fitted = rows[flag].isin(["fitted", True])
    assert (count["full"], count["none"]) == (fitted.sum(), (~fitted).sum())


def test_a_collective_looks_the_same_in_every_panel():
    """One legend names the colours of all."""
    for name in ("collectives", "held_out"):
        looks = {}
        for axes in base.function(f"scaling_{name}")(DATA).figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                looks.setdefault(label, set()).add((handle.get_color(), handle.get_marker()))
        assert len(looks) > 2 and all(len(each) == 1 for each in looks.values())
        assert len(set.union(*looks.values())) == len(looks)


def test_held_out_times_have_bands_and_every_split_a_panel():
    axes, runs = base.function("scaling_held_out")(DATA).figure.axes, DATA.runs("scaling_network")
    assert len(axes) == len(runs[runs.protocols == 3])
    for panel, (_, run) in zip(
        axes, runs[runs.protocols == 3].sort_values(["source", "split"]).iterrows(), strict=True
    ):
        hollow = [line for line in panel.lines if line.get_fillstyle() == "none"]
        assert sum(len(line.get_xdata()) for line in hollow) == run.held_out_rows
        assert len(panel.collections[0].get_segments()) == run.held_out_rows
        assert f"{100 * run.held_out_covered:.0f} % inside" in panel.get_title()


def test_a_cell_without_a_plan_that_fits_stays_white():
    drawing, runs = maps.scaling_models(DATA), DATA.runs("scaling_map")
    cells = tables.series(runs[runs.over == "size_ranks"])
    assert (cells.plan == "none fits").any()
    assert sum(len(axes.patches) for axes in drawing.figure.axes) == (cells.plan != "none fits").sum()


def test_a_plan_has_one_letter_in_all_maps():
    legends = [make(DATA).figure.legends[0] for make in (maps.scaling_models, maps.scaling_networks)]
    names = [{text.get_text().split(": ")[1]: text.get_text() for text in legend.texts} for legend in legends]
    shared = names[0].keys() & names[1].keys()
    assert len(shared) > 1 and all(names[0][plan] == names[1][plan] for plan in shared)


def test_the_widest_swings_come_first():
    axes = training.scaling_tornado(DATA, parameters=3).figure.axes[0]
    widths = [abs(patch.get_width()) for patch in axes.patches]
    swings = [low + high for low, high in zip(widths[:3], widths[3:], strict=True)]
    assert len(swings) == 3 and swings == sorted(swings, reverse=True)


def test_every_scenario_and_the_papers_numbers_are_in_the_figure_of_assumptions():
    drawing, runs = base.function("scaling_assumptions")(DATA), most_draws(DATA.runs("scaling_ladder"))
    rungs = tables.series(runs).query("kind in ('cumulative', 'single')")
    panels = {axes.get_title().split("\n")[0]: axes for axes in drawing.figure.axes[:4]}
    assert list(panels) == ["hierarchical ÷ ZeRO++", "ZeRO++ ÷ ZeRO-3", "hierarchical ÷ ZeRO-3", "efficiency"]
    markers = [line for line in panels["ZeRO++ ÷ ZeRO-3"].lines if line.get_linestyle() == "None"]
    drawn = {round(x, 9) for line in markers for x in line.get_xdata()}
    assert drawn == {round(x, 9) for x in rungs.zeropp_over_zero3}
    full = sum(len(line.get_xdata()) for line in markers if line.get_fillstyle() == "full")
    assert full == rungs.reached_zeropp_over_zero3.sum()


def test_published_ratios_stand_against_predicted_ones_with_bands():
    left = base.function("scaling_overlap")(DATA).figure.axes[0]
    table = tables.series(most_draws(DATA.runs("scaling_validation"))).query("kind == 'point'")
    assert len(left.containers) == 2
    assert sum(len(container.lines[0].get_xdata()) for container in left.containers) == len(table) == 16
