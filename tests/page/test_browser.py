"""The page in a real Chromium: what a reader does, with mouse and keys, in both themes and three widths; nothing else
is fetched; hostile text is text; axe-core finds nothing serious.
"""

import os
import shutil
from pathlib import Path

import pytest

from specscope.page.write import PageRun, write_page
from specscope.trace.wire.reading import read_capture
from tests.page.html import BAD, hostile
from tests.waiting import until

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here: pip install -e '.[dev]'")


def comes(page, expression):
    """Wait until this is true. Playwright's own wait evaluates it on the page, whose policy forbids that."""
    until(lambda: page.evaluate(expression))


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
ROOT = Path(__file__).parents[2]
AXE = ROOT / "specscope/page/source/node_modules/axe-core/axe.min.js"
VIEWS = ["", "#r1@9/1", "#/analysis", "#/rejections", "#/tune", "#/findings"]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of pages: of the samples, of two compared, of a hostile capture."""
    folder = tmp_path_factory.mktemp("pages")

    def run(name):
        reader = read_capture(ROOT / "traces" / f"{name}.jsonl")
        return PageRun(f"{name}.jsonl", reader.history, reader.warnings)

    made = {name: [run(name)] for name in ("sampled", "eagle")}
    made |= {"compared": [run("sampled"), run("evidence")], "hostile": [hostile()]}
    for name, runs in made.items():
        write_page(folder / f"{name}.html", runs)
    return {name: (folder / f"{name}.html").as_uri() for name in made}


@pytest.fixture
def tab(browser):
    """Opens an address; at the end nothing went wrong on the page, and nothing but the file was asked for."""
    wrong, asked, contexts = [], [], []

    def open_at(address, width=1280, height=900, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"it says {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.wait_for_selector("#main")
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert wrong == []
    assert {url.split(":")[0] for url in asked} <= {"file", "data", "blob"}
    assert len({url.split("#")[0] for url in asked if url.startswith("file")}) <= len(contexts)


def text(page, selector):
    return page.locator(selector).inner_text()


def test_open_search_and_click_a_token(pages, tab):
    page = tab(pages["sampled"])
    assert "mean acceptance length" in text(page, ".figures")
    page.get_by_role("link", name="Steps", exact=True).click()
    page.wait_for_selector(".output .token")
    page.keyboard.press("F")
    page.get_by_label("text:").fill("autumn")
    page.wait_for_selector(".hits button")
    assert "utumn" in text(page, ".hits li:first-child mark")
    page.keyboard.press("Enter")
    comes(page, "location.hash.startsWith('#r2@')")
    page.locator(".output .token").nth(3).click()
    step = page.locator(".output .token").nth(3).get_attribute("title").rsplit(" ", 1)[1]
    comes(page, f"location.hash === '#r2@{step}'")
    assert f"Step {step}" in text(page, ".panel.step h2")


def test_by_keyboard_to_a_rejection_and_a_link_to_it(pages, tab, browser):
    page = tab(f"{pages['eagle']}#r1@0")
    page.wait_for_selector(".panel.step")
    page.keyboard.press("n")
    page.wait_for_selector(".tree .rejected")
    page.keyboard.press("ArrowDown")
    comes(page, "/#r1@\\d+\\/\\d+$/.test(location.hash)")
    name, why = text(page, ".node header span"), text(page, ".node .why")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.keyboard.press("y")
    comes(page, "document.querySelector('output').textContent === 'copied'")
    link = page.evaluate("navigator.clipboard.readText()")
    other = tab(link)
    other.wait_for_selector(".node")
    assert (text(other, ".node header span"), text(other, ".node .why")) == (name, why)
    page.keyboard.press("?")
    assert "next step that ended in a rejection" in text(page, "dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_escape_leaves_the_filter_and_all_requests(pages, tab):
    page = tab(f"{pages['sampled']}#r0@3")
    page.keyboard.press("/")
    comes(page, "document.activeElement.id === 'filter'")
    page.keyboard.type("zebra")
    page.wait_for_selector("text=no request fits the filter")
    page.keyboard.press("Escape")
    comes(page, "document.querySelectorAll('.requests .row').length === 3")
    page.keyboard.press("n")
    comes(page, "location.hash === '#r0@4'")
    assert page.locator("#filter").input_value() == ""


@pytest.mark.parametrize("place", ["r7@2", "r0@99", "r0@3/99"])
def test_an_address_of_nothing_says_so(place, pages, tab):
    page = tab(f"{pages['sampled']}#{place}")
    page.wait_for_selector(f"text=There is no {place} in this file.")


def test_a_prompt_is_found_and_the_first_rejection_is_named(pages, tab):
    page = tab(pages["eagle"])
    first = page.locator("a.first").inner_text()
    page.locator("a.first").click()
    page.wait_for_selector(".tree .rejected")
    assert text(page, ".node header span").split("/")[0] in first
    prompt = text(page, ".output .prompt").split()[0]
    page.keyboard.press("F")
    page.get_by_label("text:").fill(prompt)
    page.wait_for_selector(".hits button:has-text('prompt')")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_where_two_runs_part(pages, tab):
    page = tab(pages["compared"])
    page.get_by_role("link", name="Look at the first difference").click()
    page.wait_for_selector(".pairs .side .tree")
    assert page.locator(".side .tree").count() == 2
    assert "the outputs part at token" in text(page, ".panel.request")
    page.keyboard.press("n")
    comes(page, "/^#\\/pairs\\/[12]$/.test(location.hash)")
    page.get_by_role("link", name="Open B at this step").click()
    comes(page, "location.hash.startsWith('#B:')")


SIZES = [(width, scheme) for width in (360, 1280, 2560) for scheme in ("light", "dark")]


@pytest.mark.parametrize(
    ("width", "scheme"), [pytest.param(*size, marks=pytest.mark.slow if n % 3 else ()) for n, size in enumerate(SIZES)]
)
def test_every_view_fits_and_is_accessible(width, scheme, pages, tab):
    if not AXE.is_file():
        pytest.skip("no axe-core here: cd specscope/page/source && npm ci")
    shots = os.environ.get("SPECSCOPE_SCREENSHOTS")
    for number, address in enumerate([*(pages["sampled"] + view for view in VIEWS), f"{pages['compared']}#/pairs/0"]):
        page = tab(address, width, 900, scheme)
        comes(page, "!document.body.textContent.includes('…\\n') && document.querySelector('main').childElementCount")
        page.wait_for_timeout(0)
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"]][:3])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == []
        if shots:
            page.screenshot(path=f"{shots}/{number}-{width}-{scheme}.png")


def test_hostile_text_is_text(pages, tab):
    page = tab(f"{pages['hostile']}#r0@1/0")
    page.wait_for_selector(".tree")
    for view in ("#/overview", "#/analysis", "#/rejections", "#/findings", "#r0@1/0"):
        page.evaluate(f"location.hash = '{view}'")
        page.wait_for_selector("#main")
        shown = page.evaluate("document.body.innerText")
        assert not {"\u202e", "\x1b"} & set(shown)
    assert page.locator("img").count() == 0
    assert page.evaluate("document.scripts.length") == page.evaluate(
        "document.querySelectorAll('body > script').length"
    )
    assert BAD[:20] in shown
