"""Write what is generated in README.md and docs/: tables of methods, tasks and settings, and lists of the reference.

    python docs/tables.py

What stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->` is generated; tests/test_docs.py fails where it is out
of date.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from itertools import groupby
from pathlib import Path

import subquad as sq
from subquad.core.files import write
from subquad.research.papers import catalogue as _with_their_tasks  # noqa: F401
from subquad.research.training.settings import ModelSettings, ParallelSettings, TrainingSettings
from subquad.research.training.tasks import TASKS, Task

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # for `python docs/tables.py`, and for pytest

import compatibility  # noqa: E402
import reference  # noqa: E402

MASKS = {"window": "window", "dense_mask": "dense"}  # beside padding and segments, which all methods take
CAUSAL = {"strict": "yes", "values-only": "values only", "no": "no"}


def yes(flag: bool) -> str:
    """A truth value in words."""
    return "yes" if flag else "no"


def masks(traits: sq.Traits) -> str:
    """The masks that a method takes in addition to the causal one."""
    return ", ".join(["padding", "segments"] + [word for trait, word in MASKS.items() if getattr(traits, trait)])


def cross(traits: sq.Traits) -> str:
    """Whether a method takes keys of tokens other than the queries' own."""
    return "steps on a cache" if traits.cached and not traits.cross else yes(traits.cross)


def causal(traits: sq.Traits) -> str:
    """Whether a method is causal, and whether it then decodes from a state."""
    return CAUSAL[traits.causal] + (", recurrent" if traits.recurrent else "")


def settings(method: type[sq.Method]) -> str:
    """Settings with their defaults."""
    return ", ".join(f"`{field.name}={field.default}`" for field in fields(method)) or "none"


def exact_when(traits: sq.Traits) -> str:
    """The settings at which a method equals exact attention."""
    if isinstance(traits.exact_limit, Mapping):
        limits = traits.exact_limit.items()
        return " and ".join(f"`{name}` {'=' if isinstance(n, int) else '≥'} {n}" for name, n in limits) or "always"
    return "never"


def when(page: str) -> str:
    """The first line below "When to use it" of a method's page, which is one sentence without links."""
    return page.partition("## When to use it\n\n")[2].partition("\n")[0]


def short_methods_table() -> str:
    """The table of README.md: one row per method with its use and whether it is causal."""
    rows = [["method", "when to use it", "causal"], ["---"] * 3]
    for name, method in sq.METHODS.items():
        use = when((ROOT / "docs" / "methods" / f"{name}.md").read_text("utf-8"))
        rows.append([f"[`{name}`](docs/methods/{name}.md)", use, causal(method.traits)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def methods_table() -> str:
    """The table of docs/index.md: one row per method with its settings and traits."""
    header = ["method", "settings", "causal", "cross-attention", "other masks", "bias", "exact when", "cost"]
    rows = [header, ["---"] * len(header)]
    for name, method in sq.METHODS.items():
        t = method.traits
        link = f"[`{name}`](methods/{name}.md)"
        options = [causal(t), cross(t), masks(t), yes(t.bias)]
        rows.append([link, settings(method), *options, exact_when(t), t.complexity])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def traits_table(traits: sq.Traits) -> str:
    """All traits of one method."""
    why = f": {traits.exact_limit}" if isinstance(traits.exact_limit, str) else ""
    rows = {
        "causal": CAUSAL[traits.causal],
        "cross-attention": cross(traits),
        "other masks": masks(traits),
        "decodes from a state of fixed size": yes(traits.recurrent),
        "additive bias": yes(traits.bias),
        "grouped-query heads": "yes",
        "exact when": exact_when(traits) + why,
        "depends on the seed": yes(traits.stochastic),
        "permuted queries give permuted outputs": yes(traits.order_free),
        "learned parameters": yes(traits.learned),
        "can return (out, log-sum-exp)": yes(traits.lse),
        "dropout drops": traits.dropout,
        "cost": traits.complexity,
        "source": traits.source,
    }
    return "\n".join(["| trait | |", "| --- | --- |", *(f"| {what} | {value} |" for what, value in rows.items())])


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
    rows = ["| task | data and metric | best model by | data folder |", "| --- | --- | --- | --- |"]
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
    """The overview of the methods, their compatibility and the reference."""
    parts = {
        "methods-overview": {"chooser": compatibility.chooser(), "families": compatibility.families()},
        "compatibility": {"masks": compatibility.masks(), "programs": compatibility.programs()},
        **{f"reference/{name}": {"entries": entries} for name, entries in reference.pages().items()},
    }
    return {(page := ROOT / f"docs/{name}.md"): filled(page, bodies) for name, bodies in parts.items()}


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
    tables = {ROOT / "README.md": short_methods_table(), ROOT / "docs/index.md": methods_table()}
    files = {path: fill(path.read_text("utf-8"), "methods", table) for path, table in tables.items()}
    for name, method in sq.METHODS.items():
        page = ROOT / "docs" / "methods" / f"{name}.md"
        if not page.exists():
            raise SystemExit(f"{page} is missing: write the page of {method.name!r} first")
        files[page] = fill(page.read_text("utf-8"), "traits", traits_table(method.traits))
    return files | training_pages() | overviews()


if __name__ == "__main__":
    for path, text in generated().items():
        write(path, text)
