from html.parser import HTMLParser

import pytest

from subquad.report.page import html
from subquad.report.plots import plots
from tests.report import sample
from tests.report.test_tables import noisy

VOID = {"meta", "img", "wbr", "br", "link", "hr"}


class Page(HTMLParser):
    """Tags, attributes and text; fails on tags that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module", params=[sample.encoder, sample.causal])
def report(request):
    return request.param()


@pytest.fixture(scope="module")
def page(report):
    return Page(html(report, plots(report)))


def test_loads_nothing(page):
    for _, attrs in page.tags:
        assert "href" not in attrs
        assert attrs.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert not any("url(" in text or "@import" in text for text in page.text)


def test_accessible(page):
    assert all(attrs["alt"] for attrs in page.all("img"))
    assert len(page.all("img")) == 3
    assert all(attrs.get("scope") in ("row", "col", "colgroup") for attrs in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert page.all("html") == [{"lang": "en"}]


def test_recommendation_comes_first_and_everything_is_said(page, report):
    text = "".join(page.text)
    body = text[text.index("compared with exact attention") :]
    assert body.index(report["recommendation"]["headline"]) < body.index("baseline")
    for fact in (report["command"], *report["notes"], *report["versions"].values(), *report["hardware"].values()):
        assert fact in body
    for method in report["methods"]:
        assert method["method"] in body
        assert method.get("reason", "") in body


def test_untrusted_text_is_escaped():
    report = sample.encoder()
    evil = '<script>alert("x")</script>'
    report["model"]["name"] = report["command"] = report["created"] = evil
    report["notes"] = [evil]
    report["methods"][-1] |= {"method": f"lha:{evil}", "reason": evil}
    report["recommendation"] = {"choice": f"lha:{evil}", "headline": evil, "reasons": [f"lha:{evil} {evil}"]}
    page = Page(html(report, {}))
    assert page.all("script") == []
    assert evil in "".join(page.text)


def test_a_busy_machine_is_said_above_the_table_and_no_tie_is_green():
    page = html(noisy(), {})
    assert page.index('class="busy"') < page.index("<table>")
    assert "The machine was busy: exact attention timed against itself differs by up to 40 %" in page
    methods = page[page.index("<table>") : page.index("Model, text, settings and machine")]
    assert 'class="faster"' not in methods
    assert 'class="slower"' in methods  # "none" seen is the word for no crossover
    assert methods.count('class="tie" title="within the noise: neither faster nor slower"') > 3 * len(sample.ENCODER)
    quiet = html(sample.encoder(), {})
    assert 'class="busy"' not in quiet
    assert 'class="faster"' in quiet
    assert "Noise: exact attention timed against itself" in quiet
