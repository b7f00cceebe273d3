"""Both pages in a headless Chromium: sorting, filters, themes, narrow screens, texts of points, no requests."""

import shutil

import pytest

from tests.tools.report import sample
from tests.tools.report.test_page import compared, planned

sync_api = pytest.importorskip("playwright.sync_api", reason="no browser tests: playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = ("compare", "plan")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no browser tests: Chromium is not installed"),
]


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    report = sample.encoder()
    report["recommendation"]["next"] = "subquad plan model --text 'my notes'"
    for name, page in zip(PAGES, (compared(report), planned()), strict=True):
        (folder / f"{name}.html").write_text(page, "utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in PAGES}


@pytest.fixture
def open_page(browser, addresses):
    """Opens a page; after the test, nothing was requested and nothing written to the console."""
    contexts, said = [], []

    def open_it(name, **settings):
        context = browser.new_context(**settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: said.append(request.url) if request.url != addresses[name] else None)
        page.goto(addresses[name])
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert said == []


def names(page):
    """The methods in the order of the main table, as a reader sees them."""
    return page.eval_on_selector_all(
        "#methods tbody [data-entry]", "rows => rows.filter(r => r.offsetParent).map(r => r.dataset.entry)"
    )


def shown(tip):
    """The text of the tooltip, which a reader must see."""
    assert tip.is_visible()
    return tip.inner_text()


ROWS = list(sample.ENCODER)
REFUSED = "lha:buckets=8"


def test_sorting_by_numbers_and_names(open_page):
    page = open_page("compare")
    assert names(page) == ["full", *ROWS, REFUSED]
    fidelity = page.locator("#methods thead tr:last-child th:nth-child(2)")
    by_fidelity = sorted(ROWS, key=lambda name: sample.ENCODER[name][0][0])
    fidelity.get_by_role("button").click()
    assert fidelity.get_attribute("aria-sort") == "descending"
    assert names(page) == ["full", *by_fidelity[::-1], REFUSED]
    page.keyboard.press("Enter")  # on the button, which has the focus
    assert fidelity.get_attribute("aria-sort") == "ascending"
    assert names(page) == ["full", *by_fidelity, REFUSED]
    page.locator("#methods").get_by_role("button", name="method").click()
    assert fidelity.get_attribute("aria-sort") is None
    assert names(page)[:4] == [
        "full",
        "clustered:clusters=25",
        "clustered:clusters=100",
        "i-clustered:clusters=25,topk=32",
    ]


def test_missing_figures_are_last_in_both_orders(open_page):
    page = open_page("compare")
    table = page.locator("table").filter(has=page.get_by_text("One attention call", exact=True))
    last = table.locator("thead tr:last-child th").last.get_by_role("button")
    for order in ("descending", "ascending"):
        last.click()
        figures = table.locator("tbody.rows tr td:last-child").all_inner_texts()
        assert figures[-1] == "–"
        shown = [float(text.strip("↓≈×")) for text in figures if text != "–"]
        assert shown == sorted(shown, reverse=order == "descending")
        assert len(shown) == len(ROWS) - 1


def test_filters_say_how_many_rows_they_show(open_page):
    page = open_page("compare")
    said = page.locator("form output")
    assert said.inner_text() == "9 of 9 methods shown, and exact attention"
    name = page.get_by_role("searchbox", name="Method")
    name.fill("I-CLUSTERED")
    assert names(page) == ["full", *ROWS[4:]]
    assert said.inner_text() == "4 of 9 methods shown, and exact attention"
    page.get_by_label("only fidelity ≥ 0.99 at 512 tokens").check()
    assert names(page) == ["full", *ROWS[5:]]
    name.fill("lha")
    assert names(page) == ["full"]
    page.get_by_label("only fidelity").uncheck()
    assert names(page) == ["full", REFUSED]
    assert said.inner_text() == "1 of 9 methods shown, and exact attention"


def test_the_tables_of_a_plan_are_sorted(open_page):
    page = open_page("plan")
    table = page.locator("table").filter(has=page.get_by_text("Layers", exact=True))
    head = table.get_by_role("button", name="loss").last
    head.click()
    assert table.locator("tbody.rows th").all_inner_texts() == ["5", "0", "3", "2", "1", "4"]
    table.get_by_role("button", name="layer").click()
    assert table.locator("tbody.rows th").all_inner_texts() == [*"012345"]


@pytest.mark.parametrize("name", PAGES)
def test_the_theme_follows_the_reader(name, open_page):
    looks, pictures = [], []
    for scheme in ("light", "dark"):
        page = open_page(name, color_scheme=scheme)
        text = page.locator(".plot.wide svg text").first
        style = "e => [getComputedStyle(document.body).backgroundColor, getComputedStyle(e).fill]"
        point = page.locator(".plot.wide .point").last
        looks.append([*text.evaluate(style), point.evaluate("e => getComputedStyle(e).fill")])
        pictures.append(page.locator(".plot.wide svg").first.screenshot())
    assert all(light != dark for light, dark in zip(*looks, strict=True))
    assert pictures[0] != pictures[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_screen_shows_the_speed_without_scrolling(name, open_page):
    page = open_page(name, viewport={"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    speed = page.locator("table").first.get_by_role("button", name="speed-up").first.bounding_box()
    assert speed["x"] + speed["width"] <= 388
    figure = page.locator("table").first.locator("td.faster, td.slower").first.bounding_box()
    assert figure["x"] + figure["width"] <= 388
    assert page.locator(".plot.narrow svg").first.is_visible()
    assert not page.locator(".plot.wide svg").first.is_visible()
    size = page.locator(".plot.narrow svg text").first.evaluate("e => e.getBoundingClientRect().height")
    assert size >= 11


def test_points_and_terms_say_what_they_are(open_page):
    page = open_page("compare")
    tip = page.locator("#tip")
    points = page.locator(".plot.wide").first.locator(".point")
    points.first.hover()
    assert shown(tip) == "full\nfidelity 1.0000, speed-up 1.00× at 512 tokens"
    points.first.focus()
    page.keyboard.press("ArrowRight")
    assert shown(tip) == "shared-full\nfidelity 0.7120, speed-up ≈0.99× at 512 tokens\nwithin the noise"
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.get_by_role("link", name="What fidelity means").first.focus()
    assert shown(tip).startswith("How close the model's output is to the exact model's")
    page.keyboard.press("Enter")
    assert page.url.endswith("#term-fidelity")


def test_a_finger_leaves_the_text_until_the_next_touch(open_page):
    page = open_page("plan", viewport={"width": 400, "height": 800}, has_touch=True)
    tip = page.locator("#tip")
    point = page.locator(".plot.narrow").last.locator(".point").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] + 8, box["y"] + box["height"] / 2)  # beside it, as fingers do
    assert shown(tip) == "plan\nfidelity 0.9: 1.40×, predicted"
    page.touchscreen.tap(5, 5)
    assert tip.is_hidden()


def test_commands_are_copied(open_page):
    page = open_page("compare", permissions=["clipboard-read", "clipboard-write"])
    copy = page.locator(".advice").get_by_role("button", name="Copy").last
    copy.click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "subquad plan model --text 'my notes'"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_without_its_script(name, open_page):
    page = open_page(name, java_script_enabled=False)
    assert page.locator("table").first.is_visible()
    assert page.locator(".plot.wide svg").first.is_visible()
    assert page.get_by_role("button").count() == 0
    assert not page.locator("form:visible").count()
    assert page.get_by_role("heading", name="Glossary").is_visible()
