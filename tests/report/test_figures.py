"""Figures without a kernel: the catalogue is true, every figure says so without records, and draws the shipped ones."""

import functools
import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from claims_made_up import claim as one_claim
from claims_made_up import named, pair
from report import legible
from typer.testing import CliRunner

from repro import cli, experiments, paths
from repro.claims import registry
from repro.cli import planned
from repro.experiments import stored
from repro.plan import config, jobs
from repro.records import provenance
from repro.records.source import _inside_package
from repro.report import figures
from repro.report.figures import base
from repro.report.figures import claims as of_claims
from repro.report.figures import data as tables
from repro.report.figures.tables import rounded, show
from repro.report.figures.zero.runs import OWN, Training

SHIPPED = str(paths.root() / config.load()[0].shipped / "records")
FIGURES = list(figures.FIGURES)


@pytest.fixture(scope="module")
def claims():
    return {claim.id: claim for claim in registry.load()}


@pytest.fixture
def skipped(monkeypatch):
    """Why figures had nothing to show."""
    said = []
    skip = base.skip
    monkeypatch.setattr(base, "skip", lambda name, reason: said.append(reason) or skip(name, reason))
    return said


OTHER_FORM = {  # claims whose number their figure shows in another form
    "FL-PROG.c": "in percent there, times here",
    "FL-TP.a": "said in words: all ranks fused alike",
}


@pytest.mark.parametrize("name", figures.FIGURES)
def test_the_catalogue_is_true(name, claims):
    entry = figures.entry(name)
    assert entry.asks.endswith("?") and entry.reads and set(entry.reads) <= set(experiments.names())
    assert {claims[claim].value.experiment for claim in entry.claims} <= set(entry.reads)
    assert (paths.root() / f"notebooks/{entry.notebook}.ipynb").exists()
    # Each is also the name of a rule of the workflow.
    assert name not in experiments.names() and name not in {each.notebook for each in figures.FIGURES.values()}


NO_FIGURE = {
    "FL-TP.c": "runs on GPUs only: flover_ranks draws it, where there are such records",
    "ZT-2.c": "runs on 48 nodes only: zero_scaling draws it, where there are such records",
}


def test_every_claim_with_a_reading_has_a_figure(claims):
    shown = {claim for entry in figures.FIGURES.values() for claim in entry.claims}
    assert {claim.id for claim in claims.values() if claim.value} - shown == NO_FIGURE.keys()


NOT_SHOWN = {"zero_peers": "needs CUDA, and has no run yet"}


def test_every_experiment_is_shown():
    """By more than the figure of all claims, which reads every one."""
    several = (set(entry.reads) for entry in figures.FIGURES.values())
    shown = {name for reads in several if reads != set(experiments.names()) for name in reads}
    assert set(experiments.names()) - shown == NOT_SHOWN.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_its_function_and_says_so_without_records(name, tmp_path, skipped):
    assert base.function(name).__doc__
    base.draw(name, tmp_path / "records", tmp_path)
    assert len(skipped) == 1 and "cannot be drawn" not in str(skipped[0])  # which is said after any error of a figure
    assert (tmp_path / f"{name}.png").stat().st_size > 1000


def test_what_is_hard_to_read_is_told():
    figure, axes = base.plt.subplots(figsize=(16, 2))
    axes.text(0.5, 0.5, "one", fontsize=5)
    axes.text(0.5, 0.5, "two")
    assert legible.faults(figure)[1:] == ["5 points: 'one'", "'one' on 'two'"]
    assert "inches wide" in legible.faults(figure)[0]
    figure, (left, right) = base.plt.subplots(1, 2, figsize=(8, 3))
    left.set_title("left")
    left.plot([1], [2], "o")
    right.plot([1, 2], [3, 4], "o", mfc="none", label="ours")
    assert legible.faults(figure) == [
        "one number in the panel 'left'",
        "hollow marks beside filled ones, which nothing explains",
    ]
    left.plot([2], [2], "o")
    right.legend()
    assert legible.faults(figure) == []


@functools.cache
def of_shipped_records(name):
    """A figure, not saved, for the tests that look at it."""
    return base.draw(name, SHIPPED)


def words_in(figure):
    return " ".join(text.get_text() for text in figure.findobj(base.plt.Text))


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_draws_the_shipped_records(name):
    if not any((Path(SHIPPED) / experiment).exists() for experiment in figures.entry(name).reads):
        pytest.skip("no shipped records of what it shows yet")
    figure = of_shipped_records(name)
    assert legible.faults(figure) == []
    assert "nothing to show" not in words_in(figure) and any(axes.has_data() for axes in figure.axes)


def test_the_code_of_every_figure_is_in_the_hash_of_readers(monkeypatch):
    """`draw` finds figures by name, which no import shows."""
    plan = jobs.make("smoke")
    monkeypatch.setattr(provenance, "source_hash", lambda *modules: " ".join(modules))
    reader = planned.document(plan)["reader"]
    modules = [each for name in reader.split("-")[0].split() for each in _inside_package(name)]
    assert {"repro.report.figures", "repro.report.figures.zero.times", "repro.report.html"} <= set(modules)
    assert all(importlib.util.find_spec(module) for module in modules)


def test_other_code_of_an_experiment_draws_its_figures_anew(monkeypatch):
    """They say which records are of older code."""
    plan, hashed = jobs.make("smoke"), provenance.source_hash
    before = planned.document(plan)["reader"]
    assert planned.document(plan)["reader"] == before
    other = "repro.experiments.zero_train"
    monkeypatch.setattr(provenance, "source_hash", lambda module: hashed(module) + "x" * (module == other))
    assert planned.document(plan)["reader"] != before


def test_what_is_missing_is_said_with_its_values(capsys):
    data = base.Data(SHIPPED, {})
    assert set(data.runs("moe_train", text="both").text) == {"both"}
    show(lambda data: data.runs("moe_train", text="both", experts=7), SHIPPED)
    assert (
        capsys.readouterr().out == "Nothing to show. No record of a finished moe_train run with text both, experts 7.\n"
    )


@pytest.fixture
def made_by(tmp_path, monkeypatch):
    """Three records of the queue model, those of the given numbers made by the present code; the folder of records."""
    files = sorted((Path(SHIPPED) / "flover_queue").glob("gpt-j*.json"))[:3]

    def write(*now: int) -> Path:
        (own := tmp_path / "records/flover_queue").mkdir(parents=True, exist_ok=True)
        for number, path in enumerate(files):
            run = json.loads(path.read_text()) | {"series": None}
            run["provenance"]["source_hash"] = "now" if number in now else "then"
            (own / path.name).write_text(json.dumps(run))
        return tmp_path / "records"

    monkeypatch.setattr(provenance, "source_hash", lambda module: "now")
    return write


@pytest.mark.parametrize(
    ("now", "words"), [((), "All 3 runs are by older"), ((1,), "2 of 3 runs are by older"), ((0, 1, 2), "")]
)
def test_runs_of_older_code_are_marked(made_by, now, words, monkeypatch, capsys):
    """In the stamp of a figure, of the runs that it asked for; above a table of a notebook."""
    monkeypatch.setattr(base, "function", lambda name: drawn)

    def drawn(data: base.Data) -> base.Drawing:
        assert len(data.runs("flover_queue")) == len(data.all_runs("flover_queue")) == 3
        return base.Drawing(base.plt.figure(), "modelled", "What it shows.")

    folder = made_by(*now)
    asks, stamp = base.draw("flover_model", folder).get_supxlabel().split("\n", 1)
    stamp = stamp.replace("\n", " ")
    assert asks == figures.entry("flover_model").asks
    assert stamp.startswith("Evidence: modelled. What it shows. From 3 runs of ") and ("older" in stamp) == bool(words)
    assert words in stamp
    assert not capsys.readouterr().out
    assert sum(~base.Data(folder).all_runs("flover_queue").older_code) == len(now)
    base.Data(folder).runs("flover_queue")
    told = capsys.readouterr().out.splitlines()
    assert len(told) == (2 if words else 0)
    assert all(line.startswith(f"flover_queue: {words.lower()} code; a new run may differ") for line in told)


def test_only_runs_that_are_drawn_count(made_by):
    """Those that a figure names of all that it asked for, and those that a number rests on."""
    data = base.Data(made_by(1), {})
    table = data.all_runs("flover_queue")
    assert len(data.used) == 3
    data.only(table[:2])
    assert set(data.used) == set(table.path[:2])
    base.Data(made_by(1)).only(table)  # a table of a notebook has no stamp
    data.only(table[:1])
    assert data.of_point("flover_queue", "iterations", table.iloc[1])
    assert set(data.used) == set(table.path[:2])


def test_only_runs_that_are_asked_for_count_as_older(made_by):
    data = base.Data(made_by(1), {})
    [one, *_] = data.all_runs("flover_queue").requests
    data = base.Data(data.folder, {})
    data.runs("flover_queue", requests=one)
    assert len(data.used) == 1 and all(old for _, old in data.used.values())


def test_nodes_of_a_cluster_are_not_called_one_machine():
    runs = base.Data(SHIPPED, {}).runs("zero_train")
    assert "emulated nodes of one machine" in Training(runs).size()
    assert "machine" not in Training(runs.assign(fabric=OWN)).size()


def test_an_option_changes_the_figure(tmp_path):
    heights = [base.draw("zero_memory", SHIPPED, **options).get_figheight() for options in ({}, {"plans": ["zero3"]})]
    assert heights[0] > heights[1]


def test_verdicts_beside_a_figure(tmp_path):
    assert base.verdicts("zero_bytes", tmp_path).empty
    found = base.verdicts("zero_bytes", SHIPPED).set_index("claim")
    assert list(found.index) == list(figures.entry("zero_bytes").claims)
    assert found.agreement["ZP-1.a"] == "reproduced" and found.ours["ZP-1.a"].startswith("3 M")


def test_one_figure_from_the_command_line(tmp_path):
    command = [*["figure", "zero_bytes", "--set", "plans=[zero3,zeropp]", "--results"], SHIPPED, "--out", str(tmp_path)]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert (tmp_path / "zero_bytes.png").exists() and (tmp_path / "zero_bytes.svg").exists()
    (records := tmp_path / "own/records").mkdir(parents=True)
    assert CliRunner().invoke(cli.app, ["figure", "zero_bytes", "--results", str(records)]).exit_code == 0
    assert (tmp_path / "own/figures/zero_bytes.json").exists()
    assert not list(records.iterdir())  # where it would be read as a record, and be none
    inside = CliRunner().invoke(cli.app, ["figure", "zero_bytes", "--results", f"{SHIPPED}/zero_train"])
    assert inside.exit_code == 2 and "--out (and a report's --figures): found none" in inside.stderr.replace("\n", "")
    bare = ["report", "--results", str(Path(SHIPPED).parent), "--figures", str(tmp_path / "own")]
    report = CliRunner().invoke(cli.app, bare)  # it would take the place of the shipped one, which has figures
    assert report.exit_code == 2 and "--figures: found none" in report.stderr.replace("\n", "")


def test_the_shipped_figure_stands_beside_a_run_that_holds_less(tmp_path):
    """Marked as such; not beside the shipped records themselves, nor where they cannot answer."""
    shipped = Path(SHIPPED)
    (own := tmp_path / "records/flover_queue").mkdir(parents=True)
    for path in sorted((shipped / "flover_queue").glob("*.json"))[:2]:
        shutil.copy(path, own)
    found = base.draw_shipped("flover_model", tmp_path / "records", tmp_path / "figures")
    assert f"\nShipped records ({shipped.parent.name}), not of this run." in found.get_supxlabel()
    names = sorted(path.name for path in (tmp_path / "figures/shipped").iterdir())
    assert names == ["flover_model.json", "flover_model.png"]
    assert base.draw_shipped("flover_model", shipped, tmp_path / "other") is None
    assert not (tmp_path / "other").exists()
    assert base.draw_shipped("flover_model", shipped, tmp_path / "figures") is None  # a later run holds as much
    assert not list((tmp_path / "figures/shipped").iterdir())


def test_claims_without_a_verdict_are_named(tmp_path, capsys, monkeypatch):
    """Without a cause: their runs may have failed."""
    monkeypatch.setattr(base, "_display", lambda figure, output, name: None)
    monkeypatch.setattr(base, "draw_shipped", lambda *_: None)
    base.show("zero_bytes", tmp_path / "records")
    assert capsys.readouterr().out == "Without a verdict (`repro claims` says why): ZP-1.a, ZP-1.b, ZP-1.c, ZP-1.d\n"


def test_a_file_that_is_no_record_is_told_once(made_by, capsys):
    data = base.Data(made_by(0, 1, 2))
    (data.folder / "flover_queue/half.json").write_text("{")
    assert len(data.runs("flover_queue")) == len(data.all_runs("flover_queue")) == 3
    assert capsys.readouterr().out.count("not used: ") == 1


def test_records_are_read_again_once_they_change(made_by, monkeypatch):
    """And not before: the figures of a notebook ask for the same ones."""
    folder, reads, collect = made_by(0, 1), [], tables.stored.collect
    monkeypatch.setattr(tables.stored, "collect", lambda path: reads.append(path) or collect(path))
    first = tables.kept(folder, "flover_queue")
    assert tables.kept(folder, "flover_queue") is first and len(reads) == 1
    path = next(iter(first.records))
    path.write_text("{")
    cut = tables.kept(folder, "flover_queue")
    assert (len(first.records), len(cut.records), len(cut.problems)) == (3, 2, 1)
    path.unlink()
    path.symlink_to("nowhere")
    assert len(tables.kept(folder, "flover_queue").records) == 2 and len(reads) == 3


def test_tables_show_texts_of_records_as_they_stand():
    """Nothing that a record says is HTML."""
    said = "<script>alert()</script>"
    columns = ["claim", "agreement", "what the paper says", "ours", "reason"]
    shown = of_claims.styled(pd.DataFrame([["ZT-1.a", "not run", "faster", "–", said]], columns=columns))
    for table in (shown, rounded(pd.DataFrame({"number": [1.5], "system": [said]}, index=[said]))):
        assert said not in table.to_html() and "&lt;script&gt;" in table.to_html()


def test_a_line_stands_between_papers_whose_claims_begin_alike():
    both = [one_claim(), one_claim(id="ZP-1.a")]
    figure = of_claims._overview(registry.evaluate(both, named(*pair(1.0))), {one.id: one for one in both})
    lines = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [0, 1]]
    assert [list(line.get_ydata()) for line in lines] == [[0.5, 0.5]]


def _drawn_numbers(name):
    """All coordinates of marks and heights of bars of a figure, and the words in it."""
    figure = of_shipped_records(name)
    axes = [each for each in figure.axes if each.get_visible()]
    numbers = [number for each in axes for line in each.lines for number in np.ravel(line.get_xydata()).astype(float)]
    bars = [patch for each in axes for patch in each.patches if hasattr(patch, "get_height")]
    numbers += [size for bar in bars for size in (bar.get_height(), bar.get_width())]
    return np.array(numbers), words_in(figure)


@pytest.mark.parametrize("name", [name for name in FIGURES if figures.entry(name).claims])
def test_a_figure_shows_the_number_of_its_claim(name, claims):
    """Drawn, or written to three digits or four; where the records answer the claim."""
    numbers, words = _drawn_numbers(name)
    entry = figures.entry(name)
    records = {path: run for each in entry.reads for path, run in stored.collect(Path(SHIPPED) / each).records.items()}
    checked = [claims[each] for each in entry.claims if each not in OTHER_FORM]
    for claim, verdict in zip(checked, registry.evaluate(checked, records), strict=True):
        if verdict.value is not None:
            drawn = np.isclose(numbers, verdict.value, rtol=1e-6).any()
            said = re.sub(r"From \d+\s+runs?[^.]*\.", "", words)  # a count and dates
            texts = "|".join(re.escape(f"{verdict.value:.{digits}g}") for digits in (3, 4))
            number = rf"(?<![\w.,-])(?:{texts})(?!\w|[.,-]\d)"
            assert drawn or re.search(number, said), (claim.id, verdict.value)
