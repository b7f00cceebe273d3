"""The prose uses standard terms, docstrings can be read alone, and Markdown has one sentence on each line."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.prose import (
    COMPLETE,
    Line,
    lines_of,
    markdown_lines,
    python_lines,
    sentences,
    summaries,
    with_a_line_for_each_sentence,
)

ROOT = Path(__file__).parents[1]
MARKDOWN = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OTHERS = [*sorted((ROOT / "src").rglob("*.j2")), *sorted((ROOT / "src").rglob("*.[ch]pp"))]
# The pages to which [language] applies.
LANGUAGE = set(MARKDOWN)
WORDS = tomllib.loads((ROOT / "tests" / "words.toml").read_text("utf-8"))


def found(lines: Iterable[Line], *tables: str) -> list[str]:
    """The words in the lines that the tables of words.toml rule out, with the remedy."""
    lines = list(lines)
    text, any_case = "\n".join(line.text for line in lines), re.IGNORECASE | re.MULTILINE
    rules = [(re.compile(pattern, any_case), say) for table in tables for pattern, say in WORDS[table].items()]
    rules = [(pattern, say) for pattern, say in rules if pattern.search(text)]  # few are in a file at all
    return [
        f"line {line.number}: {hit[0]!r}; write: {say}"
        for line in lines
        for pattern, say in rules
        if (hit := pattern.search(line.text))
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_prose_uses_standard_terms():
    wrong = []
    for path in (*MARKDOWN, *SOURCES, *OTHERS):
        tables = ("everywhere", "markdown") if path.suffix == ".md" else ("everywhere",)
        tables += ("language",) if path.suffix != ".md" or path in LANGUAGE else ()
        lines = found(lines_of(path), *tables)
        if path.suffix == ".py":
            lines += found(summaries(path.read_text("utf-8")), "docstrings")
        wrong += [f"{name_of(path)}, {line}" for line in lines]
    assert not wrong, "\n".join(wrong)


def test_markdown_has_one_sentence_on_each_line():
    wrong = []
    for path in MARKDOWN:
        for line in markdown_lines(path.read_text("utf-8")):
            where = f"{name_of(path)}, line {line.number}"
            if len(sentences(line.text)) > 1:
                wrong.append(f"{where}: start a new line at {sentences(line.text)[1][:40]!r}")
            elif line.continues and not COMPLETE.search(line.text):
                wrong.append(f"{where}: the sentence continues in the next line; join them")
    remedy = "python -m tests.prose FILE.md writes a file so"
    assert not wrong, "\n".join([*wrong, remedy])


# ---------------------------------------------------------------------- the checks themselves

EVERYWHERE = (
    "what transformer attention costs is less than N² work",
    "foretold over 2 s a call",
    "drawn by lot",
    "methods divided by spaces",
    "what is to mend",
    "SDPA loses to it",
    "the order is drawn anew",
    "Of the order of the passages, and which are kept apart.",
    "an interrupted run goes on from it",
    "interrupted at any moment it goes on exactly",
    "if a cosine of 0.97 is near enough",
    "which is as fast there as what meets it",
    "What to take when.",
    "where softmax attention is to be resembled",
    "Which attention can go into this model?",
    "what does that lose, what does it gain?",
    "the line joins the methods that no other beats in both",
    "by updates of 1/1.65 of the time",
    "more than two of one for one of the other",
    "What is outside stands in for by one key",
    "one key and one value a cell",
    "which are numbered from M on. None twice.",
    "None counts for nothing",
    "and is all where there is nothing else",
    "Two methods of a method, beside `attend`, answer",
    "those of the class are the defaults'",
    "Bucketed methods are many and share their parts",
    "is what decides at 512 tokens",
    "Methods that you name have what you say.",
    "The same behind the item's first and last token",
    "length 'x' is no whole number",
    "Use so many of them",
)
DOCSTRINGS = (
    "What `save` wrote.",
    "Who calls it now.",
    "Whose candidate is in each slot.",
    "Whether a call is audited.",
    "As `refusal`, for what is no floating-point data.",
    "Like the others.",
    "Of one layer.",
    "By layer.",
    "The same of another model.",
    "One more.",
    "None twice.",
)
IN_MARKDOWN = (
    "a cosine of .966",
    "at 2048 tokens",
    "1.7 times as fast",
)
LANGUAGE_OF_RIDDLES = (
    "Where fewer keys are visible, all are used.",
    "The mask is read. Where it cannot be, it is refused.",
    "The table says which keys a query meets.",
    "`subquad doctor` says what is missing.",
    "published figures beside ours",
    "its memory and that of those of the others",
    "what stands before a line",
    "where the first query stands among the keys",
    "Give every function what you hold.",
    "the folder holds another run",
    "SDPA takes a bool mask",
    "a token's bucket is its own business",
)
ALLOWED = (
    "Tell whether, where and when it runs: where does it end?",
    "Whatever is given is checked.",
    "The paper says that this is exact.",
    "The names take the place of numbers.",
    "The message states which layers were refused.",
    "There is no checkpoint yet.",
    "It is no longer than that.",
    "A method is attached to a layer.",
    "Like SDPA, it takes a scale.",
    "Assigns each key to a cell.",
    "The sum is divided by the number of keys.",
    "0.966 at 2,048 tokens, 1.75×",
    "The bucket decides which keys a query sees.",
    "Both masks at once.",
)


TABLES = {"everywhere": EVERYWHERE, "docstrings": DOCSTRINGS, "markdown": IN_MARKDOWN, "language": LANGUAGE_OF_RIDDLES}


def test_phrases_that_are_ruled_out_are_found():
    missed = [text for table, texts in TABLES.items() for text in texts if not found([Line(1, text)], table)]
    assert not missed


def test_a_finding_names_the_line_and_the_remedy():
    assert found([Line(7, "the time foretold for it")], "everywhere") == ["line 7: 'foretold'; write: predicted"]


def test_plain_sentences_are_allowed():
    assert found([Line(number, text) for number, text in enumerate(ALLOWED)], *TABLES) == []


def test_sentences_of_a_line():
    assert sentences("One is 0.5 of it. Two, e.g. `a. B`, follows (all of it). Three.") == [
        "One is 0.5 of it.",
        "Two, e.g. `a. B`, follows (all of it).",
        "Three.",
    ]
    assert len(sentences("- **A label.** Its sentence, see [a page](x.Y.md).")) == 1
    assert len(sentences("2. **A label** and its sentence.")) == 1


def test_prose_of_markdown():
    text = (
        "# Title. Two\n\nOne line\ngoes on.\n\n- An item.\n  More.\n\n```sh\nno prose. None\n```\n| a table. With |\n"
    )
    assert [(line.number, line.continues) for line in markdown_lines(text)] == [
        (3, True),
        (4, False),
        (6, True),
        (7, False),
    ]


def test_markdown_is_written_with_a_line_for_each_sentence():
    text = "# Title. Two\n\nOne line\ngoes on. Two.\n\n1. An item. More\n   of it.\n\n```sh\ncode. None\n```\n"
    written = "# Title. Two\n\nOne line goes on.\nTwo.\n\n1. An item.\n   More of it.\n\n```sh\ncode. None\n```\n"
    assert with_a_line_for_each_sentence(text) == written
    assert with_a_line_for_each_sentence(written) == written


def test_a_comment_at_the_end_of_a_line_belongs_to_its_sentence():
    text = "It is 1.75×. <!-- figures: a.md; not 2 --> Two\ngoes on. <!-- figures: b.md -->\n"
    written = "It is 1.75×. <!-- figures: a.md; not 2 -->\nTwo goes on. <!-- figures: b.md -->\n"
    assert with_a_line_for_each_sentence(text) == written
    assert with_a_line_for_each_sentence(written) == written
    assert [(line.text, line.continues) for line in markdown_lines(written)] == [
        ("It is 1.75×.", True),
        ("Two goes on.", False),
    ]


def test_prose_of_python():
    source = 'def f(x):\n    """A summary.\n\n    More."""\n    raise ValueError(f"{x} is foretold")  # why\n'
    assert [(line.number, line.text.strip()) for line in python_lines(source) if line.text.strip()] == [
        (2, "A summary."),
        (4, "More."),
        (5, "{} is foretold"),
        (5, "# why"),
    ]
    assert [line.text for line in summaries(source)] == ["A summary."]
