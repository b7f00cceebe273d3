"""The pages are whole without their script: they request nothing, can be read aloud, and hold what the script needs."""

import re
from base64 import b64encode
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from subquad.tools.compare import plots
from subquad.tools.compare.page import html
from subquad.tools.plan import plots as plan_plots
from subquad.tools.plan import tables as plan_tables
from subquad.tools.plan import write as plan_write
from subquad.tools.report.terms import TERMS
from tests.tools.report import sample
from tests.tools.report.sample_plan import plan
from tests.tools.report.test_tables import noisy

VOID = {"meta", "img", "wbr", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Tags, attributes and text; fails on tags that do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.scripts = [], [], [], []
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
        (self.scripts if "script" in self.open else self.text).append(data)

    def all(self, tag, **having):
        tags = [attrs for name, attrs in self.tags if name == tag]
        return [attrs for attrs in tags if all(attrs.get(key) == value for key, value in having.items())]


def compared(report):
    return html(sample.record(report), plots.drawings(sample.record(report)))


def planned():
    """The page of a plan, as it is written."""
    return plan_write.html(plan(), plan_plots.drawings(plan()), 'sq.load_plan("folder")')


@pytest.fixture(scope="module", params=[sample.encoder, sample.causal])
def report(request):
    return request.param()


@pytest.fixture(scope="module")
def page(report):
    return Page(compared(report))


@pytest.fixture(scope="module")
def pages(page):
    return [page, Page(planned())]


def test_loads_nothing(pages):
    for page in pages:
        for tag, attrs in page.tags:
            assert "src" not in attrs
            assert "action" not in attrs
            assert attrs.get("href", "#").startswith("#")
            assert "://" not in " ".join(filter(None, attrs.values())), tag
        assert not {"link", "iframe", "img", "object"} & {tag for tag, _ in page.tags}
        assert not any("@import" in text or "url(" in text.replace("url(#", "") for text in page.text)
        assert not re.search(r"://|\bfetch\(|XMLHttpRequest|\bimport\b", page.scripts[0])


def test_only_our_own_script_may_run(pages):
    for page in pages:
        (script,) = page.scripts
        (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
        digest = b64encode(sha256(script.encode()).digest()).decode()
        assert policy["content"].startswith("default-src 'none';")
        assert f"script-src 'sha256-{digest}'" in policy["content"]


def test_accessible(pages):
    for page in pages:
        assert all(attrs.get("scope") in ("row", "col", "colgroup") for attrs in page.all("th"))
        assert len(page.all("caption")) == len(page.all("table"))
        assert page.all("html") == [{"lang": "en"}]
        assert all(attrs["aria-label"] for attrs in page.all("div") if attrs.get("role") in ("group", "region"))


def test_every_link_and_reference_has_its_target_and_ids_are_unique(pages):
    for page in pages:
        ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
        assert len(set(ids)) == len(ids)
        links = [attrs["href"][1:] for tag, attrs in page.tags if tag in ("a", "use") and "href" in attrs]
        assert len(links) > 20
        assert set(links) <= set(ids)
        clips = {attrs["clip-path"][5:-1] for _, attrs in page.tags if "clip-path" in attrs}
        assert clips
        assert clips <= set(ids)


def test_every_figure_is_there_wide_and_narrow_and_names_its_points(page, report):
    assert len(page.all("svg")) == 8
    assert len(page.all("div", **{"class": "plot wide"})) == len(page.all("div", **{"class": "plot narrow"})) == 4
    points = [attrs for _, attrs in page.tags if attrs.get("class") == "point"]
    assert len(points) == len(page.all("title")) - 1 > 20
    text = "".join(page.text)
    length = str(report["settings"]["max_length"])
    for method in report["methods"]:
        if method["status"] == "measured":
            fidelity = method["fidelity"][length]
            assert f"{method['method']}\nfidelity {fidelity:.4f}, speed-up " in text


def test_the_plan_names_its_points():
    text = "".join(Page(planned()).text)
    assert "clustered:clusters=25\nlayer 0, 512 tokens: 41.0 % of exact attention's time, loss 0.0094" in text
    assert "exact attention\nlayer 3, 128 tokens" in text
    assert "the plan, verified\nfidelity 0.9881: 1.12×" in text
    assert "best single method\nfidelity 0.99: 1.08×, predicted" in text
    assert "128 tokens: 9 candidates were tried, and none was faster than exact attention." in text
    batches = "batches of 8, mean 284 tokens, padded to 491"
    assert f"512 tokens ({batches}): 9 candidates were tried on 13 batches, and the plan was verified on 32 " in text


def test_the_pages_are_drawn_alike_twice():
    assert planned() == planned()


def test_colours_are_the_themes(page):
    css = next(text for text in page.text if ":root" in text)
    used = {name for _, attrs in page.tags for name in re.findall(r"var\((--plot-\w+)\)", attrs.get("style") or "")}
    assert len(used) > 5
    light, dark = css.rsplit("@media (prefers-color-scheme: dark)", 1)
    for name in used:
        assert f"{name}: #{name[-6:]};" in light
        assert f"{name}: #" in dark
    assert not any(re.search(r"#[0-9a-f]{6}", attrs.get("style") or "") for _, attrs in page.tags)


def test_tables_hold_what_they_are_sorted_and_filtered_by():
    page = html(sample.record(sample.encoder()), {})
    table = page[page.index('<table class="sortable" id="methods"') :].partition("</table>")[0]
    pinned, rows = table[table.index("<tbody") :].split('<tbody class="rows">')
    assert 'data-entry="full"' in pinned
    assert pinned.count("data-entry") == 1
    assert rows.count("data-entry") == len(sample.ENCODER) + 1
    assert 'data-key="0.9312"' in rows
    assert '<td class="low" data-key="0.712" title="below the minimum fidelity">0.7120</td>' in rows
    assert '<td class="missing">–</td>' in pinned  # without a key, so that it is last in any order
    kept = re.findall(r'data-entry="([^"]*)" data-kept', rows)
    assert kept == [name for name, ((cosine, *_), *_) in sample.ENCODER.items() if cosine >= 0.99]
    assert "only fidelity ≥ 0.99 at 512 tokens" in page
    report = sample.encoder()
    del report["settings"]["min_fidelity"]
    unknown = html(sample.record(report), {})
    assert 'type="checkbox"' not in unknown
    assert "data-kept>" not in unknown


def test_the_layers_of_a_plan_are_filtered_by_number_and_method():
    page = planned()
    form = page[page.index('<form class="filters" data-table="layers" data-what="layers"') :].partition("</form>")[0]
    assert "only layers that do not run exact attention" in form
    table = page[page.index('id="layers"') :].partition("</table>")[0]
    assert 'data-entry="0 exact clustered:clusters=25 41.0 % 0.0094 0.400" data-kept' in table
    assert 'data-entry="4 exact exact – – –">' in table
    exact = replace(plan(), lengths=plan().lengths[:1])
    assert 'type="checkbox"' not in plan_write.html(exact, {}, "")
    one = replace(plan(), lengths=[replace(p, layers={"0": p.layers["0"]}) for p in plan().lengths])
    assert "<form" not in plan_write.html(one, {}, "")


@pytest.mark.parametrize("folder", [".", "runs/a"])
def test_the_code_of_a_plan_reads_the_folder_that_it_is_in(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(folder).mkdir(parents=True, exist_ok=True)
    report = replace(plan(), settings=plan().settings | {"floor_text": "fidelity ≥ 0.99"})
    plan_write.write_plan_report(report, Path(folder))
    page = "".join(Page((Path(folder) / "report.html").read_text("utf-8")).text)
    assert f'plan = sq.load_plan("{folder}")' in page


def test_the_next_command_of_a_plan_is_there_if_the_report_has_one():
    report = plan()
    assert plan_tables.NEXT not in plan_write.html(report, {}, "")
    assert plan_tables.NEXT not in plan_tables.markdown(report)
    report = replace(report, next="subquad compare --plan 'my plan'")
    page = Page(plan_write.html(report, {}, ""))
    assert report.next in page.text
    assert any(plan_tables.NEXT in text for text in page.text)
    assert f"```sh\n{report.next}\n```" in plan_tables.markdown(report)


def test_a_plan_has_no_column_without_a_figure():
    exact = replace(plan(), lengths=plan().lengths[:1])
    found = {heading: [column.title for column in table.columns] for heading, _, table in plan_tables.tables(exact)}
    assert found == {"Layers": ["128 tokens: method"]}
    both = plan_tables.layers(plan())
    assert [column.title for column in both.columns] == [
        "128 tokens: method", "512 tokens: method", "512 tokens: time", "512 tokens: loss",
            "512 tokens: layer error",
    ]  # fmt: skip
    assert [column.title for column in plan_tables.verified(plan()).columns][:2] == [
        "plan: fidelity",
        "plan: lower bound",
    ]


def test_a_length_that_is_never_faster_is_sorted_after_all_lengths():
    table = html(sample.record(sample.encoder()), {}).partition("<h2>One attention call</h2>")[2]
    assert 'data-key="Infinity">none</td>' in table
    assert 'data-key="512.0">≤512</td>' in table


def test_every_column_and_mark_has_a_meaning(page):
    heads = [head for text in page.text if (head := text.strip()) in TERMS]
    assert len(heads) > 10
    links = [attrs for attrs in page.all("a") if attrs.get("class") == "why"]
    assert all(attrs["title"] and attrs["aria-label"].startswith("What ") for attrs in links)
    (oracle,) = [a for a in page.all("a", **{"class": "quiet"}) if a["href"] == "#term-oracle-top"][:1]
    assert "It is a reference method, never recommended" in oracle["title"]
    marks = [attrs["href"] for attrs in page.all("a", **{"class": "mark"})]
    assert {"#term-baseline", "#term-reference", "#term-refused"} <= set(marks)


def test_recommendation_comes_first_and_everything_is_said(page, report):
    text = "".join(page.text)
    body = text[text.index("compared with exact attention") :]
    assert body.index(report["recommendation"]["headline"]) < body.index("baseline")
    for fact in (report["command"], *report["notes"], *report["versions"].values(), *report["hardware"].values()):
        assert fact in body
    for method in report["methods"]:
        assert method["method"] in body
        assert method.get("reason", "") in body


def test_the_next_command_is_there_if_the_report_has_one():
    report = sample.encoder()
    assert "Next, search settings" not in html(sample.record(report), {})
    report["recommendation"]["next"] = "subquad plan model --text 'my notes'"
    text = "".join(Page(html(sample.record(report), {})).text)
    assert "Next, search settings layer by layer, for this model and text." in text
    assert "subquad plan model --text 'my notes'" in text


def test_untrusted_text_is_escaped():
    report = sample.encoder()
    evil = '<script>alert("x")</script>\x01'
    report["model"]["name"] = report["command"] = report["created"] = evil
    report["notes"] = [evil]
    report["methods"][-1] |= {"method": f"lha:{evil}", "reason": evil}
    report["methods"][1]["method"] = f"clustered@{evil}"
    report["recommendation"] = {"choice": f"lha:{evil}", "headline": evil, "reasons": [f"lha:{evil} {evil}"]}
    page = Page(compared(report))
    assert page.all("script") == [{}]
    assert evil in "".join(page.text)


def test_a_busy_machine_is_said_in_the_box_and_no_tie_is_green():
    page = html(sample.record(noisy()), {})
    assert 'class="busy"' in page[page.index('class="advice"') : page.index("</section>")]
    assert "The machine was busy: exact attention timed against itself differs by up to 40 %" in page
    methods = page[page.index("<table") : page.index("Model, text, settings and machine")]
    assert 'class="faster"' not in methods
    assert 'class="slower"' in methods  # "none" seen is the word for no crossover
    ties = re.findall(r'class="tie" data-key="[\d.]+" title="within the noise: neither faster nor slower"', methods)
    assert len(ties) > 3 * len(sample.ENCODER)
    quiet = html(sample.record(sample.encoder()), {})
    assert 'class="busy"' not in quiet
    assert 'class="faster"' in quiet
    assert "Noise: exact attention timed against itself" in quiet
