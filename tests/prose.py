"""Find the project's prose: paragraphs of Markdown, and the strings and comments of Python sources.

    python -m tests.prose FILE.md …

writes Markdown files again with one sentence on each line, which tests/test_prose.py asks for.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CODE = re.compile(r"(`+).+?\1|\]\([^)\s]*\)")  # inline code and the targets of links
NO_PROSE = re.compile(r"\s*(\||#|<!--|!\[|$)")  # tables, headings, comments, pictures and empty lines
GENERATED = re.compile(r"<!-- [\w ]+:(begin|end) -->")  # what stands between comes from the code
FENCE = re.compile(r"\s*```")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")
LABEL = re.compile(r"\s*(([-*]|\d+\.) )?\*\*[^*]+[.:]\*\* ")  # "- **Label.** ", which belongs to the sentence after it
SHORT = r"(?<!\be\.g)(?<!\bi\.e)(?<!\bal)(?<!\bvs)"
COMMENT = re.compile(r"[ \t]*<!--.*?-->")  # a marker at the end of a line, which belongs to the sentence before it
END = re.compile(SHORT + rf"""[.!?][)"”*]*({COMMENT.pattern})*(?=\s+["“(\[*]*([A-Z0-9`‖§]|subquad\b|\Z))""")
COMPLETE = re.compile(r"""[.!?:;…]["”)*`]*$""")


@dataclass(frozen=True)
class Line:
    """A line of prose: its number in the file, its text, and whether the paragraph goes on in the next line."""

    number: int
    text: str
    continues: bool = False


def markdown_lines(text: str) -> Iterator[Line]:
    """The prose of a Markdown file, without code blocks, tables, headings, comments and generated parts."""
    lines, fenced, listed, generated = text.splitlines(), False, False, False
    for number, line in enumerate(lines, 1):
        if mark := GENERATED.match(line):
            generated = mark[1] == "begin"
        if generated:
            continue
        if FENCE.match(line):
            fenced = not fenced
            continue
        listed = bool(ITEM.match(line)) or (listed and (not line or line.startswith("  ")))
        if fenced or NO_PROSE.match(line) or (line.startswith("    ") and not listed):
            continue
        following = lines[number] if number < len(lines) else ""
        last = NO_PROSE.match(following) or ITEM.match(following) or FENCE.match(following)
        yield Line(number, COMMENT.sub("", line), continues=not last)


def sentences(line: str) -> list[str]:
    """The sentences of a line; a list mark and a label in bold belong to the first."""
    hidden = CODE.sub(lambda found: "`" + "x" * (len(found[0]) - 2) + "`", line)
    before = LABEL.match(hidden) or ITEM.match(hidden)
    ends = [end.end() for end in END.finditer(hidden, before.end() if before else 0)]
    starts = [0, *ends]
    return [part.strip() for a, b in zip(starts, [*ends, len(line)], strict=True) if (part := line[a:b]).strip()]


def with_a_line_for_each_sentence(text: str) -> str:
    """A Markdown file in which every sentence of a paragraph or list item has its own line."""
    prose = {line.number: line for line in markdown_lines(text)}
    written: list[str] = []
    indent, paragraph = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if number not in prose:
            written.append(line)
            continue
        if not paragraph:
            mark = ITEM.match(line)
            indent = mark[0] if mark else line[: len(line) - len(line.lstrip())]
        paragraph = f"{paragraph} {line[len(indent) :] if not paragraph else line.strip()}".strip()
        if not prose[number].continues:
            first, *others = sentences(paragraph)
            written += [indent + first, *(" " * len(indent) + sentence for sentence in others)]
            paragraph = ""
    return "\n".join(written) + "\n"


def python_lines(source: str) -> Iterator[Line]:
    """The lines of all strings (docstrings, messages and help texts) and of all comments."""
    tree = ast.parse(source)
    parts = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield Line(node.lineno, "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            for number, text in enumerate(node.value.split("\n"), node.lineno):
                yield Line(number, text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield Line(token.start[0], token.string)


def summaries(source: str) -> Iterator[Line]:
    """The first line of every docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
            yield Line(node.body[0].lineno, doc.partition("\n")[0])


def lines_of(path: Path) -> Iterator[Line]:
    """The prose of a file, by its kind."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        yield from python_lines(text)
    elif path.suffix == ".md":
        lines = enumerate(text.splitlines(), 1)
        tables = (Line(n, COMMENT.sub("", line)) for n, line in lines if line.lstrip().startswith(("|", "#")))
        yield from (Line(line.number, CODE.sub("`…`", line.text)) for line in (*markdown_lines(text), *tables))
    else:
        yield from (Line(number, line) for number, line in enumerate(text.splitlines(), 1))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(with_a_line_for_each_sentence(path.read_text("utf-8")), "utf-8")
