"""The generated pages: they are what the command writes now, and hold every claim as the records say it."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from claims_made_up import TIMED, WHEN, claim, named, occasions, pair
from typer.testing import CliRunner

from repro import cli, paths
from repro.claims import registry, sides
from repro.records import record
from repro.records.record import Provenance
from repro.report import docs, html
from repro.report.docs import facts, latex, machines, table

APPENDIX = ("docs/appendix/sc-ad-ae.tex", "docs/appendix/ctuning.tex")


@pytest.fixture(scope="module")
def names():
    return docs.vocabulary()


@pytest.fixture(scope="module")
def pages(names):
    return docs.pages(names)


@pytest.fixture(scope="module")
def rows(names):
    return names["rows"]


def test_the_pages_are_those_of_the_shipped_records(pages, monkeypatch):
    """What `repro docs --check` compares, README's picture with them."""
    monkeypatch.setattr(docs, "pages", lambda: pages)
    assert list(docs.differing()) == [], "run `repro docs`"


def test_the_shipped_report_has_the_verdicts_of_the_shipped_records(names, rows):
    page = (paths.root() / names["reference"] / "report.html").read_text()
    shown = json.loads(page.split('<script type="application/json" id="facts">')[1].split("</script>")[0])
    assert shown == [html.facts(row) for row in rows], "write it again: results/README.md says how"


def test_every_claim_stands_on_the_page_with_its_numbers_and_command(pages, rows):
    lines = {line.split("**")[1]: line for line in pages["docs/claims.md"].splitlines() if line.startswith("| <a id=")}
    assert lines.keys() == {row.claim.id for row in rows}
    for row in rows:
        cells = lines[row.claim.id]
        said = [row.here, row.stated, row.judged, f"`{row.own_command}`" if row.command else "–"]
        assert [text for text in said if text not in cells] == []


def test_a_primary_claim_stands_with_its_figure_in_readme_and_appendix(pages, rows):
    for row in rows:
        if row.claim.primary:
            assert f"| `{row.figure}` |" in pages["README.md"], row.claim.id
            assert row.figure in pages["docs/appendix/eurosys.md"]
            assert all(f"figure {latex.code(row.figure)}" in pages[path] for path in APPENDIX)


def test_every_claim_with_records_has_a_command_and_minutes(rows):
    for row in rows:
        if row.verdict.records:
            assert row.command and row.seconds and row.minutes != "–", row.claim.id


def test_minutes_count_a_record_once(rows):
    alike = [row for row in rows if row.claim.id in ("ZT-1.a", "ZT-1.d")]
    shared = {name: seconds for row in alike for name, seconds in row.seconds.items()}
    assert len(shared) < sum(len(row.seconds) for row in alike)
    assert float(table.minutes(alike)) == pytest.approx(sum(shared.values()) / 60, abs=0.06)


def test_the_command_of_a_claim_makes_its_points(rows):
    """The tier that it names holds every point that the claim read."""
    commands = {row.claim.id: row.command for row in rows}
    assert commands["EX-E2E.c"] == "repro reproduce exflow_gain --tier full"  # 32 experts
    assert commands["EX-E2E.b"] == "repro reproduce exflow_gain"
    assert commands["FL-F4a.k"] == "repro reproduce flover_gpu --tier gpu"
    assert commands["ZT-2.c"] == "snakemake --profile workflows/profiles/frontier --config claim=ZT-2.c"


def test_a_claim_needs_the_machine_of_its_runs_and_root_where_links_were_shaped(rows):
    needs = {row.claim.id: row.needs for row in rows}
    assert needs["ZT-1.a"] == needs["EX-E2E.b"] == "2 cores, root" and needs["FL-F8.a"] == "2 cores"


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([[2.0, 2.0], [1.8, 1.9], [2.2, 2.1], [2.0, 2.0]], "1.6 to 2.48"),
        ([[2.0, 2.0]], "not known: one occasion"),
        ([], "–"),
    ],
)
def test_where_a_further_occasion_lies(ratios, said):
    one = claim(value=TIMED)
    assert table._expected(one, registry.evaluate([one], named(*occasions(ratios)))[0]) == said


def test_what_no_clock_measures_comes_out_the_same():
    assert table._expected(claim(), registry.evaluate([claim()], named(*pair(1.0)))[0]) == "the same, to 3 digits"


def test_a_folder_without_records_is_named(names, monkeypatch):
    monkeypatch.setattr(docs.stored, "collect", lambda folder: record.Collection(records={}, problems=[]))
    with pytest.raises(ValueError, match=f"^{names['reference']}/records: found no records; allowed: records"):
        docs.vocabulary()


def test_the_minutes_of_the_makefile_are_not_said_of_the_machine_of_the_records(names):
    other = names | {"machines": ["96 cores, 512 GiB: 9 records"]}
    assert "96 cores" not in docs.pages(other)["README.md"]


def test_a_changed_page_is_named_and_written(pages, monkeypatch, tmp_path):
    monkeypatch.setattr(docs, "pages", lambda: pages)
    monkeypatch.setattr(docs, "picture", lambda: b"a picture")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    assert set(docs.differing()) == {*pages, docs.PICTURE}
    docs.write(docs.differing())
    assert docs.differing() == {}
    (tmp_path / "docs/claims.md").write_text("by hand")
    (tmp_path / APPENDIX[0]).unlink()
    (tmp_path / docs.PICTURE).write_bytes(b"of older records")
    assert list(docs.differing()) == ["docs/claims.md", APPENDIX[0], docs.PICTURE]
    docs.write(docs.differing())
    assert docs.differing() == {}


@pytest.mark.parametrize(
    ("page", "parts"),
    [
        ("README.md", {"outcome", "minutes", "occasions", "sample", "claims", "machines", "evidence"}),
        ("docs/flover.md", {"serving", "queue"}),
        ("docs/scaling.md", {"collectives", "steps"}),
    ],
)
def test_a_page_keeps_what_is_written_by_hand(pages, page, parts):
    outside = re.compile(r"(?s)<!-- repro docs: (\w+)(?: [\w-]+)? -->.*?<!-- end of \1 -->")
    there = (paths.root() / page).read_text()
    assert outside.sub("", pages[page]) == outside.sub("", there)
    assert set(outside.findall(there)) == parts


def test_a_split_of_collectives_without_a_run_is_named():
    with pytest.raises(ValueError, match=r"scaling_network of \('a100_dgx', 'ranks'\): found no such run"):
        docs.collectives.held_out({})


def test_predicted_steps_are_told_with_the_worst_of_them(tmp_path):
    shipped = paths.root() / "results/reference/laptop-2core/records"
    for row in docs.steps.predicted(shipped):
        assert row.median < 0.05 and row.within <= len(row.errors) == 13 * len(row.rates.split(", ")) - 3
        assert abs(row.largest) == max(map(abs, row.errors)) and re.fullmatch(r"`\w+` at [\d.]+", row.worst)
    with pytest.raises(ValueError, match="found no such run in"):
        docs.steps.predicted(tmp_path)


def test_tables_on_runs_by_older_code_are_marked(names, monkeypatch):
    """Not only those of claims."""
    monkeypatch.setattr(docs.steps.provenance, "older", set)  # all of them
    pages = docs.pages(names)
    for page, parts in (("docs/scaling.md", ("collectives", "steps")), ("docs/flover.md", ("queue",))):
        text = pages[page]
        for part in parts:
            shown = re.search(rf"(?s)<!-- repro docs: {part}.*?<!-- end of {part} -->", text)[0]
            assert "† rests on runs by older code" in shown and shown.count("†") > 2


def test_every_other_machine_stands_beside_the_shipped_records(names, pages):
    shipped = paths.root() / names["reference"]
    folders = {path.name for path in shipped.parent.iterdir() if path.is_dir()} - {shipped.name}
    assert folders and {machine.name for machine in names["others"]} == folders
    page = pages["docs/machines.md"]
    for machine in names["others"]:
        assert f"## {machine.name}\n" in page and machine.says in page and machine.hardware in page
        for row in (*machine.timed, *machine.others):  # and of others that have two values
            assert f"| [{row.name}](claims.md#{row.name.lower()}) {row.title} | " in page
        assert {row.name for row in machine.claims}.isdisjoint(machine.shared)


def test_a_machine_that_lies_outside_is_told_from_one_that_turns_a_claim(tmp_path):
    """0.5 times is slower, where the shipped runs say twice as fast; 1.5 times is only less."""
    one = claim(value=TIMED)
    shipped = sides.Side(
        "shipped", tmp_path / "own", runs := named(*occasions([[2.0, 2.0]] * 4)), registry.evaluate([one], runs)
    )
    for ratio, turned in ((0.5, True), (1.5, False)):
        runs = named(*occasions([[ratio, ratio]] * 2))
        other = sides.Side("slow", tmp_path / "slow", runs, registry.evaluate([one], runs))
        machine = machines._machine([one], other, shipped)
        assert [row.name for row in machine.outside] == ["ZT-1.a"] and bool(machine.turned) == turned
        assert machine.occasions == 2 and machine.says.startswith("Of 1 claims on times 0 lie inside")
    same = machines._machine([one], sides.Side("copy", tmp_path / "copy", shipped.records, shipped.verdicts), shipped)
    assert (
        same.shared == ["ZT-1.a"]
        and not same.claims
        and same.says.endswith("1 rest on the very runs that are shipped.")
    )


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        (["a"], ["b"], "Another kind of machine"),
        (["a, new"], ["a, old", "a"], "A different processor that reports the same name"),
        (["a, new", "a, old"], ["a, old"], "A machine with a processor of the same name, which may be another"),
        (["a, new"], ["a"], "A machine with a processor of the same name, which may be another"),
    ],
)
def test_a_processor_is_another_where_its_name_or_kind_says_so(here, there, said):
    def made(*processors):
        parts = [each.partition(", ") for each in processors]
        return [Provenance(start=WHEN, end=WHEN, cpu=cpu, cpu_kind=kind) for cpu, _, kind in parts]

    assert machines._kind(made(*here), made(*there)).startswith(said)


def test_days_of_the_shipped_times_are_counted(tmp_path):
    one = claim(value=TIMED)

    def said(*hours):
        made = [run for at, hour in enumerate(hours) for run in pair(1.0, 2.0, repeat=at, hour=hour)]
        runs = named(*made)
        return machines.spans([one], sides.Side("own", tmp_path, runs, registry.evaluate([one], runs)))

    assert said(0, 2) == "processors of 1 name and, for each claim, from 1 day, at most 2 hours apart"
    assert said(0, 30) == "processors of 1 name and, for each claim, from 2 days, at most 30 hours apart"
    assert said() == ""


def test_a_part_of_the_readme_for_a_machine_without_a_primary_claim_outside(names):
    quiet = machines.Machine("quiet", "2 processors", "A processor", "A machine", {}, 1, [], [], [], [], [])
    said = docs.pages(names | {"others": [quiet]})["README.md"]
    assert "| [quiet](docs/machines.md#quiet) | A processor | 1 | 0 of 0 | 0 of 0 | 0 | none | – |" in said
    nothing = docs.pages(names | {"others": [], "spans": ""})
    assert "*outside* what the shipped runs allow" not in nothing["README.md"]
    assert not any("Times on processors come from" in text for text in nothing.values())


def test_latex_sets_every_character_or_names_it():
    assert latex.escape("50 % of a_b & {c} ~ 1.4 × [1, 2]†") == (
        r"50 \% of a\_b \& \{c\} \textasciitilde{} 1.4 $\times$ [1, 2]\textdagger{}"
    )
    assert latex.escape(latex.escape("a_b")) == r"a\_b"
    assert latex.code("a_b/c --d") == r"\texttt{a\_\allowbreak{}b/\allowbreak{}c {-}{-}d}"
    with pytest.raises(ValueError, match=r"'雪' \(CJK UNIFIED IDEOGRAPH-96EA\): found it in a text for LaTeX; allowed"):
        latex.escape("snow 雪")


@pytest.mark.parametrize("path", APPENDIX)
def test_latex_is_closed_and_plain(pages, path):
    text = pages[path]
    assert text.isascii() or all(c.isascii() or c.isalpha() for c in text)
    assert sorted(re.findall(r"\\begin{(\w+)}", text)) == sorted(re.findall(r"\\end{(\w+)}", text)) != []
    braces = re.sub(r"\\[{}]", "", text)
    assert braces.count("{") == braces.count("}")


@pytest.mark.parametrize("path", APPENDIX)
def test_latex_compiles(pages, path, tmp_path):
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex here")
    (tmp_path / "page.tex").write_text(pages[path])
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    found = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert found.returncode == 0, found.stdout[-2000:]
    wide = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide", found.stdout)]
    assert max(wide, default=0) < 10, found.stdout


def test_make_announces_the_minutes_of_the_shipped_runs():
    """Before there is an environment that could ask them."""
    tiers, promised = facts.tiers(), facts.promises()
    assert {name: int(promised[name]) for name in ("smoke", "laptop")} == {
        name: round(tiers[name].minutes) for name in ("smoke", "laptop")
    }


def test_a_makefile_without_its_promises_is_named(monkeypatch, tmp_path):
    Path(tmp_path / "Makefile").write_text("announce:\n\t@true\n")
    monkeypatch.setattr(paths, "root", lambda: tmp_path)
    with pytest.raises(ValueError, match="Makefile: announce: found other words; allowed: environment in"):
        facts.promises()


def test_check_writes_nothing_and_names_what_differs(monkeypatch):
    monkeypatch.setattr(docs, "write", lambda wanted: pytest.fail("written"))
    monkeypatch.setattr(docs, "differing", lambda: {"docs/claims.md": b"new"})
    found = CliRunner().invoke(cli.app, ["docs", "--check"])
    assert (found.exit_code, found.stdout) == (1, "docs/claims.md: differs\n")
    monkeypatch.setattr(docs, "differing", dict)
    assert CliRunner().invoke(cli.app, ["docs", "--check"]).exit_code == 0
