"""The report's page: its texts, pictures and links, without a browser (`test_report_page_browser.py` has one)."""

import itertools
import json
import re
import shutil
from urllib.parse import unquote

import pytest
from nbconvert import HTMLExporter
from PIL import Image
from report.addresses import Addresses, unresolved

from repro import paths
from repro.claims import registry, sides
from repro.experiments import stored
from repro.plan import config
from repro.report import explanations, figures, html
from repro.report.page import links, pictures

SHIPPED = paths.root() / "results/reference" / config.load()[0].reference
TEXTS = {"asks": "", "caption": "What it shows.", "evidence": "modelled", "n": "From 9 runs."}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the shipped records of one experiment, one of them by older code, two pictures, and its report, beside
    these alone, since reading all shipped records takes seconds."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copytree(SHIPPED / "records/flover_queue", folder / "records/flover_queue")
    shipped = stored.collect(folder / "records").records
    older = sorted((folder / "records/flover_queue").glob("*.json"))[0]
    older.write_text(re.sub(r'"source_hash": *"\w+"', '"source_hash": "then"', older.read_text()))
    for name in ("flover_model", "flover_batch_cost", "shipped/flover_model"):
        path = folder / f"figures/{name}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (800, 400), "white").save(path)
        path.with_suffix(".json").write_text(json.dumps(TEXTS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "papers", beginning_with_a_claim(registry.papers()))
        patch.setattr(
            sides, "shipped", lambda claims: sides.Side("shipped", SHIPPED, shipped, registry.evaluate(claims, shipped))
        )
        patch.setattr(html.machines, "others", lambda claims, shipped: [])
        html.write(folder / "records", folder / "figures", folder / "report.html")
    return folder


def beginning_with_a_claim(papers):
    """The papers, of one of which the first sentence begins with a number of ours."""
    first = papers["FL"]
    changed = first.model_copy(update={"in_short": "{FL-F8.a}: " + first.in_short})
    return lambda: papers | {"FL": changed}


@pytest.fixture(scope="module")
def page(run):
    return (run / "report.html").read_text()


def test_every_link_leads_somewhere(run, page):
    read = Addresses(page)
    assert len(read.ids) == len(set(read.ids))
    assert unresolved(run / "report.html") == []
    assert any("records/flover_queue/" in link for link in read.links)


def test_headings_are_in_order(page):
    levels = Addresses(page).levels
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(levels))


def test_the_page_needs_no_network(page):
    assert not re.search(r"(src|href)=\"?(https?:)?//(?!arxiv)", page) and "@import" not in page
    assert not re.search(r"<(script|link)[^>]+(src|href)=", page)


def test_a_picture_has_its_question_answer_and_verdicts_in_words(page):
    assert page.count("data:image/webp;base64,") == 3
    alts = Addresses(page).alts
    model = next(text for text in alts if text.startswith(figures.entry("flover_model").asks))
    assert "Evidence: modelled. What it shows. From 9 runs." in model
    assert "14 iteration counts, χ²: expected 14, ours " in model and "reproduced, modelled" in model
    assert not re.search(r"\b[A-Z]+-[A-Z0-9]+[a-z]?\.[a-z]\b|flover_model", " ".join(alts))


def test_three_sentences_tell_every_primary_claim(page):
    told = page.split('id="outcome"')[1].split('id="primary"')[0]
    cards = re.findall(r"<section.*?</section>", told, re.DOTALL)
    claims = registry.load()
    assert len(cards) == len({claim.id.split("-")[0] for claim in claims if claim.kind == "claim"})
    for card in cards:
        paragraph = re.sub(r"<[^>]+>|\d\.\d", "", card.split("<p>")[2].split("</p>")[0])
        assert len(re.findall(r"\.(?:\s|$)", paragraph)) == 3, paragraph
    primary = re.findall(r'<tbody id="([^"]+)"[^>]*data-kind="claim primary"', page)
    assert len(primary) == sum(claim.primary for claim in claims) and all(f'href="#{name}"' in told for name in primary)


def test_each_claim_opens_to_what_it_rests_on(page):
    (claim,) = re.findall(r'<tbody id="FL-F8.a".*?</tbody>', page, re.DOTALL)
    for words in (
        "repro reproduce FL-F8.a",
        "#figure-flover_model",
        "flover.ipynb",
        "minutes",
        "14 ± ",
        "<dt>Made on</dt>",
    ):
        assert words in claim, words


def test_claims_of_both_sides_stand_with_ratio_allowed_variation_and_verdicts(page):
    table = page.split('id="beside"')[1].split("</table>")[0]
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr><td>.*?</tr>", table)]
    (one,) = [row for row in cells if 'href="#FL-F8.a"' in row[0]]
    assert len(cells) > 5 and one[1] == one[2] and one[3] == "1" and re.fullmatch(r"\[[\d.]+, [\d.]+\]", one[4])
    assert one[5].replace("†", "") == "reproduced, reproduced"  # of records by older code
    assert {said for row in cells for said in re.findall(r"<b>(\w+)</b>", row[6])} == {"agrees"}


def test_a_claim_without_runs_says_what_it_needs(page):
    (claim,) = re.findall(r'<tbody id="ZT-2.c".*?</tbody>', page, re.DOTALL)
    assert "<dt>It needs</dt>" in claim and "Made on" not in claim


def test_what_would_decide_a_claim_has_a_command_or_says_that_there_is_none(page):
    for name, words in (("ZT-2.c", "workflows/profiles/frontier"), ("SA-2", explanations.NO_COMMAND.capitalize())):
        (claim,) = re.findall(rf'<tbody id="{name}".*?</tbody>', page, re.DOTALL)
        assert words in claim.split("What would decide it")[1], name


def test_records_of_older_code_are_told_without_a_command_that_may_renew_others(page):
    (note,) = re.findall(r"<p class=\"note\">\d+ of \d+ records are by older code.*?</p>", page, re.DOTALL)
    assert "<code>" not in note


def test_a_section_of_a_notebook_is_found_and_has_its_place_in_html(tmp_path):
    (tmp_path / "notebooks").mkdir()
    for name in figures.NOTEBOOKS:
        shutil.copy(paths.root() / f"notebooks/{name}.ipynb", tmp_path / f"notebooks/{name}.html")  # any file there
    addresses = [links.section(name, tmp_path / "report.html").address for name in figures.FIGURES]
    assert all(re.fullmatch(r"notebooks/\w+\.html#cell-id%3D\S+", address) for address in addresses), addresses
    written, _ = HTMLExporter().from_filename(str(paths.root() / "notebooks/zero.ipynb"))
    mine = [unquote(address.split("#")[1]) for address in addresses if address.startswith("notebooks/zero.")]
    assert mine and all(f'id="{place}"' in written for place in mine)


def test_a_picture_keeps_its_size_and_its_letters(tmp_path):
    from repro.report.figures import base

    base.draw("zero_bytes", tmp_path / "none", tmp_path)
    drawn = pictures.load(tmp_path, "zero_bytes", ())
    assert (drawn.width, drawn.height) == Image.open(tmp_path / "zero_bytes.png").size
    assert (
        drawn.alt.startswith("How many bytes")
        and "Nothing to show. No record of a finished zero_train run." in drawn.alt
    )
    assert pictures.load(tmp_path, "zero_loss", ()) is None
    (tmp_path / "zero_bytes.json").write_text("{}")
    with pytest.raises(ValueError, match=r"zero_bytes\.json: no texts of a figure"):
        pictures.load(tmp_path, "zero_bytes", ())
    (tmp_path / "zero_bytes.png").write_bytes((tmp_path / "zero_bytes.png").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"zero_bytes\.png: no picture"):
        pictures.load(tmp_path, "zero_bytes", ())


# --- the shipped copy ------------------------------------------------------------------------------------------------


def test_the_shipped_page_is_small_and_whole():
    path = SHIPPED / "report.html"
    page = path.read_text()
    assert len(page) < 8e6
    assert page.count("data:image/webp;base64,") == len(figures.FIGURES)
    assert unresolved(path) == []


def test_the_shipped_page_says_what_other_machines_gave():
    page, readme = (SHIPPED / "report.html").read_text(), (paths.root() / "README.md").read_text()
    told = re.findall(r"^\| \[(laptop-\S+)\]\(.*?\) \| [^|]+ \| \d+ \| (\d+ of \d+) \|", readme, re.MULTILINE)
    assert len(told) == len(list(SHIPPED.parent.glob("*/records"))) - 1 > 0
    for name, count in told:
        assert re.search(rf"<li>[^<]*\({name}, [^<]*: {count} claims on times lie outside", page)


def test_runs_of_other_experiments_are_of_one_machine(make_record):
    """Hashes of their code differ, the machine does not."""
    facts = make_record().provenance
    runs = [make_record(provenance=facts.model_copy(update={"gpu": ["one"], "gpu_hash": code})) for code in ("x", "y")]
    assert [machine["count"] for machine in html._machines(runs)] == [2]


def test_a_machine_is_told_once_with_the_commits_that_ran_there(make_record):
    facts = make_record().provenance
    made = [("a", False, 2), ("a", True, 2), ("b", False, 2), ("", False, 4)]
    runs = [
        make_record(provenance=facts.model_copy(update={"git_commit": commit, "git_dirty": dirty, "cores": cores}))
        for commit, dirty, cores in made
    ]
    two, four = html._machines(runs)
    assert (two["count"], two["commits"], two["changed"]) == (3, [("a", 2), ("b", 1)], 1)
    assert (four["count"], four["commits"]) == (1, [("", 1)])
