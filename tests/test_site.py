"""The site: it builds, asks no other server for anything, and says what is true of the messages and the extras."""

import ast
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def texts(path: Path) -> Iterator[str]:
    """Every string in a module, with "…" where it is formatted."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield re.sub("…+", "…", text)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@cache
def texts_of_sources() -> list[str]:
    return [text for path in SOURCES for text in texts(path)]


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_server_for_anything(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason=f"the extra docs brings {module}")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    nothing_comes_from_elsewhere(tmp_path)
    the_reference_shows_every_public_name(tmp_path)
    formulae_are_where_the_script_looks_for_them(tmp_path)
    links_to_results_lead_to_their_pages(tmp_path)


def nothing_comes_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]* src=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link[^>]* href=[\"']?([^\"' >]+)", text)
        assert loaded
        assert not [place for place in loaded if re.match(r"(https?:)?//", place)], page
        assert 'class="mermaid"' not in text, f"{page}: Material loads Mermaid from another server"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\([\"']?|@import [\"']?)(https?:)?//", sheet.read_text("utf-8")), sheet


def the_reference_shows_every_public_name(site: Path) -> None:
    for name, entries in runpy.run_path(str(DOCS / "tables.py"))["reference"].pages().items():
        shown = (site / "reference" / name / "index.html").read_text("utf-8")
        headings = re.findall(r"heading: ([\w.]+)", entries)
        assert headings
        for heading in headings:
            assert re.search(rf"<h2[^>]*>(?:(?!</h2>).)*{re.escape(heading)}\b", shown, re.DOTALL), heading
        assert "doctest:" not in shown
    doctests = (site / "reference" / "attention" / "index.html").read_text("utf-8")
    assert 'class="language-pycon highlight"' in doctests
    assert "<blockquote>" not in doctests


def formulae_are_where_the_script_looks_for_them(site: Path) -> None:
    assert '<div class="formula">\\mathrm{out}_i' in (site / "methods" / "full" / "index.html").read_text("utf-8")
    assert 'querySelectorAll(".formula")' in (site / "assets" / "formulae.js").read_text("utf-8")


def links_to_results_lead_to_their_pages(site: Path) -> None:
    results = site / "benchmarks" / "results"
    assert "<table>" in (results / "engines" / "index.html").read_text("utf-8")
    assert 'href="engines/"' in (results / "index.html").read_text("utf-8")
    found = 0
    for page in site.rglob("*.html"):
        for target in re.findall(r"href=[\"']?([^\"' >#]*benchmarks/results/[^\"' >#]*)", page.read_text("utf-8")):
            there = (page.parent / target).resolve()
            assert (there / "index.html" if target.endswith("/") else there).is_file(), f"{page}: {target}"
            assert results in (there, *there.parents), f"{page}: {target}"
            found += 1
    assert found > 10


def test_links_to_results_are_those_of_the_site():
    site_target = runpy.run_path(str(DOCS / "measurements.py"))["site_target"]
    assert site_target("../../benchmarks/results/engines.md", "how-to/gpu.md") == "../benchmarks/results/engines.md"
    assert site_target("../benchmarks/results/engines.md#a", "models.md") == "benchmarks/results/engines.md#a"
    assert site_target("../benchmarks/results/", "models.md") == "benchmarks/results/index.md"
    assert site_target("../limits.md", "how-to/gpu.md") == "../limits.md"
    assert (
        site_target("https://example.org/benchmarks/results/", "models.md") == "https://example.org/benchmarks/results/"
    )


def test_formulae_are_set_by_files_beside_the_pages():
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    for line in re.findall(r"^extra_(?:css|javascript): \[(.*)\]$", config, re.MULTILINE):
        for file in line.split(", "):
            assert (DOCS / file).is_file()
    fonts = set(re.findall(r"url\((fonts/[^)]+\.woff2)\)", (DOCS / "assets/katex/katex.min.css").read_text("utf-8")))
    assert len(fonts) > 10
    assert all((DOCS / "assets/katex" / font).is_file() for font in fonts)


def test_every_method_has_its_formula():
    wrong = []
    for page in sorted((DOCS / "methods").glob("*.md")):
        formulae = re.findall(r"^```math\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
        wrong += [] if formulae else [f"{page.name} has no formula"]
        for formula in formulae:
            begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", formula) for word in ("begin", "end"))
            if formula.count("{") != formula.count("}") or begun != ended[::-1]:
                wrong.append(f"{page.name}: {formula}")
    assert not wrong, "\n".join(wrong)


def test_troubleshooting_quotes_messages_of_the_library():
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^- `(.+)`:$", page, re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        assert any(message in text for text in texts_of_sources()), f"no message of the library says {message!r}"


def test_extras_that_messages_and_pages_name_exist():
    pages = [path.read_text("utf-8") for path in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]]
    named = [
        extra
        for text in [*texts_of_sources(), *pages]
        for extra in re.findall(r"(?:subquad|\'\.|\.whl)\[([\w,]+)\]", text)
    ]
    named += [
        node.args[-1].value  # `needs("train")` of the command line, `not_installed(package, "metrics")`
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("needs", "not_installed")
        if isinstance(node.args[-1], ast.Constant)
    ]
    assert {"hf", "demo", "train", "metrics"} <= {extra for names in named for extra in names.split(",")}
    assert {extra for names in named for extra in names.split(",")} <= set(EXTRAS)


def test_the_page_on_installation_lists_every_extra():
    table = (DOCS / "install.md").read_text("utf-8")
    listed = [
        name for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`([\w-]+)`", row)
    ]
    assert set(EXTRAS) <= set(listed)
