"""The shipped report in Chromium: filters, links to places, keyboard, narrow screens, paper, and faults that axe finds.

Exhaustive: a browser takes seconds. Skipped where there is no Chromium, or no axe-core (`axe-playwright-python`).
"""

import json
import shutil

import pytest

from repro import paths
from repro.claims import registry
from repro.plan import config

api = pytest.importorskip("playwright.sync_api", reason="no playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REPORT = paths.root() / "results/reference" / config.load()[0].reference / "report.html"
WIDTHS = (1280, 768, 390)
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def chromium():
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens the report at a place, in a window of its own; what goes wrong in it fails the test."""
    contexts, faults = [], []

    def open_at(place="", width=1280, **options):
        contexts.append(chromium.new_context(viewport={"width": width, "height": 900}, **options))
        page = contexts[-1].new_page()
        page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
        page.goto(f"{REPORT.as_uri()}{place}")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert faults == []


def facts(page):
    return json.loads(page.locator("#facts").text_content())


def rows(page):
    """Ids of the claims that are shown."""
    return page.eval_on_selector_all("tbody[data-paper]", "all => all.filter(e => e.checkVisibility()).map(e => e.id)")


def test_filters_show_what_they_say_and_stand_in_the_address(opened):
    page = opened()
    known = facts(page)
    page.select_option("#f-agreement", "deviates")
    wanted = [row["id"] for row in known if row["agreement"] == "deviates"]
    assert rows(page) == wanted
    assert page.locator("#shown").text_content() == f"{len(wanted)} of {len(known)} rows."
    page.select_option("#f-paper", "ZT")
    assert rows(page) == [name for name in wanted if name.startswith("ZT-")]
    assert page.url.endswith("#verdicts?paper=ZT&agreement=deviates")
    other = opened("#verdicts?paper=ZT&agreement=deviates")
    assert rows(other) == rows(page)
    page.click("text=Show all")
    assert rows(page) == [row["id"] for row in known] and page.url.endswith("#verdicts")
    page.fill("#f-text", "weak SCALING")
    assert "ZT-2.a" in rows(page) and len(rows(page)) < 6
    page.fill("#f-text", "")
    page.select_option("#f-kind", "primary")
    page.select_option("#f-scope", "scaled down")
    primary = {claim.id for claim in registry.load() if claim.primary}
    assert rows(page) == [row["id"] for row in known if row["id"] in primary and row["scope"] == "scaled down"] != []


def test_a_link_to_a_claim_opens_it(opened):
    page = opened("#ZT-2.a")
    assert page.locator("[id='ZT-2.a'] .facts").first.is_visible()
    page.select_option("#f-paper", "FL")
    assert "ZT-2.a" not in rows(page)
    page.evaluate("location.hash = '#ZT-1.a'")
    page.wait_for_function("document.getElementById('ZT-1.a').checkVisibility()")
    assert page.locator("[id='ZT-1.a'] .facts").first.is_visible()
    page.click("text=What came out")
    page.click(".tally a >> nth=0")
    page.wait_for_function("document.getElementById('f-paper').value === 'ZT'")  # a busy browser tells the page later
    assert 0 < len(rows(page)) < 15 and "?paper=ZT" in page.url


def test_by_keyboard(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    summary = page.locator("[id='ZT-1.a'] summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("[id='ZT-1.a'] .facts").first.is_visible()
    assert summary.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_never_scrolls_sideways(opened, width):
    page = opened(width=width)
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_without_scripts_it_is_a_plain_table(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("tbody[data-paper]").count() > 50
    assert not page.locator("#filter").is_visible() and page.locator("[id='ZT-1.a']").is_visible()


def test_on_paper_everything_is_open_but_lists_of_files(opened):
    page = opened()
    page.emulate_media(media="print")
    claim = page.locator("[id='ZT-1.a']")
    assert claim.locator(".facts").is_visible() and claim.locator(".runs summary").is_visible()
    assert not claim.locator(".runs ul").is_visible()
    assert not page.locator("nav").is_visible() and not page.locator("#filter").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS[::2])
def test_axe_finds_no_serious_fault(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
    page = opened("#ZT-2.a", width, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    found = axe.Axe().run(page).response["violations"]
    serious = [one for one in found if one["impact"] in ("serious", "critical")]
    assert serious == [], [(one["id"], [node["html"][:200] for node in one["nodes"][:3]]) for one in serious]
