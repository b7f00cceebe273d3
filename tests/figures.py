"""Figures that pages quote from files of results, and the markers that name these files.

    The speed is 1.75× at 2,048 tokens. <!-- figures: benchmarks/results/engines.md -->

On a line of its own, a marker covers the block that follows, up to the next blank line. `; not 0.99, 5` at its end
exempts figures that are not in the file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path

MARKER = re.compile(r"<!-- figures: (?P<files>[^;]*?)(?:; not (?P<exempt>.*?))? -->")
RESULTS = re.compile(r"benchmarks/results/[\w-]+\.\w+")
NO_FIGURES = re.compile(r"<!--.*?-->|(`+).+?\1|\]\([^)\s]*\)")  # comments, inline code and the targets of links
FENCE = re.compile(r"\s*```")
POWER = re.compile(r"(?<=\d)\s?·\s?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")  # 1.5·10¹⁴ is 1.5e14
FROM_SUPERSCRIPT = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
UNITS = r"(?:[nµm]?s|[KMG]iB|[kMGT]B|bytes)\b"
NUMBER = re.compile(
    r"(?<![A-Za-z_\d.])(?P<number>\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)(?!\.?\d)"
    rf"(?P<unit>\s?%|×(?!\d)|\s{UNITS})?"
)


@dataclass(frozen=True)
class Figure:
    """A number as it is written, its value, its sign if one is written, and its unit."""

    text: str
    value: Decimal
    sign: str = ""
    unit: str = ""

    @property
    def is_measured(self) -> bool:
        """True if it is compared: decimal numbers, thousands, and numbers with a unit; other integers are counts."""
        return bool(self.unit) or "," in self.text or "." in self.text

    @property
    def is_result(self) -> bool:
        """True if it can only be a measurement, which a round number of tokens or of seconds need not be."""
        return self.unit in ("×", "%") or "." in self.text

    def rounds_to(self, quoted: "Figure") -> bool:
        """True if this number is `quoted`, to as many decimals as that has; a sign counts if it is quoted."""
        last_digit = int(quoted.value.as_tuple().exponent)
        near = abs(self.value - quoted.value) <= Decimal(5).scaleb(last_digit - 1)
        return near and (not quoted.sign or quoted.sign == (self.sign or "+"))


@dataclass(frozen=True)
class Marked:
    """A marker of a page: where it is, the files it names, the figures it exempts, and the lines it covers."""

    number: int
    files: tuple[str, ...]
    exempt: tuple[str, ...]
    covered: tuple[int, ...]


def numbers(text: str) -> Iterator[Figure]:
    """Every number of a text, without version numbers and numbers that are part of a name."""
    text = POWER.sub(lambda power: f"e{power[1]}".translate(FROM_SUPERSCRIPT), text)
    for found in NUMBER.finditer(text):
        before = text[max(0, found.start() - 2) : found.start()]
        sign = before[-1:] if re.fullmatch(r"(?:|[\s(|\[:,≈])[-−+]", before) else ""
        value = Decimal(found["number"].replace(",", ""))
        yield Figure(found["number"], value, sign.replace("−", "-"), (found["unit"] or "").strip())


def figures(line: str) -> list[Figure]:
    """The figures of a line of a page that are compared, without those in inline code and in targets of links."""
    return [number for number in numbers(NO_FIGURES.sub("`…`", line)) if number.is_measured]


def markers(text: str) -> Iterator[Marked]:
    """The markers of a page, which are not read inside of code blocks."""
    lines, fenced = text.splitlines(), False
    for index, line in enumerate(lines):
        fenced ^= bool(FENCE.match(line))
        if fenced or not (found := MARKER.search(line)) or f"`{found[0]}" in line:
            continue
        covered = [index]
        if not MARKER.sub("", line).strip():
            first = next((i for i in range(index + 1, len(lines)) if lines[i].strip()), len(lines))
            last = next((i for i in range(first, len(lines)) if not lines[i].strip()), len(lines))
            covered = list(range(first, last))
        files = tuple(re.split(r",\s*", found["files"].strip()))
        exempt = tuple(re.split(r",\s+", found["exempt"].strip())) if found["exempt"] else ()
        yield Marked(index + 1, files, exempt, tuple(i + 1 for i in covered))


@cache
def numbers_of(path: Path) -> tuple[Figure, ...]:
    """Every number of a file of results."""
    return tuple(numbers(path.read_text("utf-8")))


def wrong_figures(text: str, root: Path) -> list[str]:
    """The errors in the markers of a page and in the figures that they cover."""
    lines = text.splitlines()
    return [problem for marked in markers(text) for problem in _wrong(marked, lines, root)]


def _wrong(marked: Marked, lines: list[str], root: Path) -> Iterator[str]:
    missing = [file for file in marked.files if not (root / file).is_file()]
    if missing:
        yield f"line {marked.number}: the marker names {', '.join(missing)}, which is not a file"
        return
    quoted = [(line, figure) for line in marked.covered for figure in figures(lines[line - 1])]
    if not quoted:
        yield f"line {marked.number}: the marker covers no figure"
    known = [number for file in marked.files for number in numbers_of(root / file)]
    absent = [(line, figure) for line, figure in quoted if not any(number.rounds_to(figure) for number in known)]
    exempt = {next(numbers(text)).value: text for text in marked.exempt if any(numbers(text))}
    for line, figure in absent:
        if figure.value not in exempt:
            yield f"line {line}: {figure.sign}{figure.text}{figure.unit} is not in {', '.join(marked.files)}"
    for value, text in exempt.items():
        if value not in {figure.value for _, figure in absent}:
            yield f"line {marked.number}: {text} need not be exempted: it is not quoted, or it is in the file"


def unmarked_lines(text: str) -> list[str]:
    """Lines outside of code that name a file of benchmarks/results, quote a result and are covered by no marker."""
    covered = {line for marked in markers(text) for line in marked.covered}
    return [
        f"line {number}: quotes {', '.join(quoted)} and names {found[0]}; add <!-- figures: {found[0]} -->"
        for number, line in _outside_code(text)
        if number not in covered and (found := RESULTS.search(line))
        if (quoted := [figure.text + figure.unit for figure in figures(line) if figure.is_result])
    ]


def citations_without_link(text: str) -> list[str]:
    """Files of benchmarks/results that a page names in inline code without a link to them."""
    code = re.compile(r"(?<!\[)`benchmarks/results/[^`]*`")
    return [f"line {number}: link to {found}" for number, line in _outside_code(text) for found in code.findall(line)]


def _outside_code(text: str) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= bool(FENCE.match(line))
        if not fenced:
            yield number, line
