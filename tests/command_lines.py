"""Commands in Markdown, and what a shell and the command line of subquad make of them, without running anything."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import typer

from subquad.core.errors import InputError, as_input_error
from subquad.methods import parse_method
from subquad.tools.cli.commands import settings_class
from subquad.tools.cli.main import app
from subquad.tools.runs.options import from_arguments

BLOCK = re.compile(r"^(?P<indent> *)```(?:sh|bash)\n(?P<code>.*?)^ *```$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
INLINE = re.compile(r"(?<!`)(`+)(?!`)\s?(?P<code>[^\n]+?)\s?(?<!`)\1(?!`)")
PLACEHOLDERS = {"TASK": "text", "EXPERIMENT": "spectrum", "NAME": "clustered"}  # of synopses in inline code
OPERATORS = ("&&", "||", "|", ";", "&")
BEGINNINGS = ("subquad", "torchrun", "accelerate", "python", "python3", "pytest", "pip")


# typer brings click's classes under a name of its own
CommandError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


class Wrong(Exception):
    """A command cannot be run as it is written; the message has the reason."""


@dataclass(frozen=True)
class Command:
    """A command of a page: where it begins, its words, and whether it is in inline code, which may leave parts out."""

    line: int
    words: tuple[str, ...]
    inline: bool = False

    @property
    def program(self) -> str:
        """The name of the program, without the folder."""
        return self.words[0].rpartition("/")[2]


# ---------------------------------------------------------------------- the shell


def split(text: str) -> list[list[str]]:
    """The words of each command of a line, as a shell reads them, without variables in front and redirections.

    Raises:
        Wrong: a quotation mark is missing, or the shell would read a character that is meant for the program.
    """
    commands: list[list[str]] = [[]]
    for word, quoted in _words(text):
        if word in OPERATORS and not quoted:
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for each in commands if (words := _without_shell_parts(each))]


def _words(text: str) -> Iterator[tuple[str, bool]]:
    """The words of a line and whether any part of them is in quotation marks."""
    word, quoted, quote, i = "", False, "", 0
    text = text.replace("\\\n", " ")
    while i < len(text):
        c = text[i]
        if quote:
            if c == quote:
                quote = ""
            elif c == "\\" and quote == '"' and text[i + 1 : i + 2] in ('"', "\\", "$", "`"):
                word, i = word + text[i + 1], i + 1
            else:
                word += c
        elif c in "'\"":
            quote, quoted = c, True
        elif c == "\\":
            word, quoted, i = word + text[i + 1 : i + 2], True, i + 1
        elif c == "$" and text[i + 1 : i + 2] == "(":
            end = _end_of_substitution(text, i)
            word, i = word + text[i : end + 1], end
        elif c.isspace():
            if word or quoted:
                yield word, quoted
            word, quoted = "", False
        elif c == "#" and not word and not quoted:
            return
        elif operator := next((each for each in OPERATORS if text.startswith(each, i)), ""):
            after = text[i + len(operator) : i + len(operator) + 1]
            if ((word or quoted) and operator != ";") or after.strip():
                raise Wrong(f"the shell reads {operator!r} in {text[max(0, i - 20) : i + 20]!r}; use quotation marks")
            if word or quoted:
                yield word, quoted
            yield operator, False
            word, quoted, i = "", False, i + len(operator) - 1
        elif c in "<()" or (c == ">" and word not in ("", "2")) or (c in "[*?" and not _may_expand(word)):
            raise Wrong(f"the shell reads {c!r} in {text[max(0, i - 20) : i + 20]!r}; use quotation marks")
        else:
            word += c
        i += 1
    if quote:
        raise Wrong(f"a {quote} is missing")
    if word or quoted:
        yield word, quoted


def _end_of_substitution(text: str, start: int) -> int:
    end = text.find(")", start)
    if end < 0:
        raise Wrong("a ) is missing")
    return end


def _may_expand(word: str) -> bool:
    """True if a wildcard in a word is meant for the shell: in a path to a wheel."""
    return word.startswith("dist/")


def _without_shell_parts(words: list[str]) -> list[str]:
    """The words of a command without assignments, `nice` and what is redirected."""
    while words and (re.match(r"[A-Za-z_]\w*=", words[0]) or words[0] in ("nice", "time", "env")):
        words = words[1:]
    redirections = [i for i, word in enumerate(words) if re.fullmatch(r"2?>>?", word)]
    return words[: redirections[0]] if redirections else words


# ---------------------------------------------------------------------- pages


def commands(text: str) -> Iterator[Command | tuple[int, str]]:
    """The commands of a page, in blocks of the shell and in inline code; of a wrong one, its line and what is wrong."""
    for block in BLOCK.finditer(text):
        number = text.count("\n", 0, block.start("code")) + 1
        pending, begun = "", number
        for line in block["code"].splitlines():
            pending, begun = (f"{pending}\n{line}", begun) if pending else (line, number)
            number += 1
            if not pending.endswith("\\"):
                yield from _commands(pending, begun)
                pending = ""
    prose = text
    for pattern in (FENCED, COMMENT):
        prose = pattern.sub(lambda hidden: "\n" * hidden[0].count("\n"), prose)
    for number, line in enumerate(prose.splitlines(), 1):
        for found in INLINE.finditer(line):
            code = found["code"].replace("\\|", "|") if line.lstrip().startswith("|") else found["code"]
            begins = re.sub(r"^(\w+=\S*\s+)+", "", code).partition(" ")[0].rpartition("/")[2]
            if begins in BEGINNINGS and " " in code:
                yield from _commands(code, number, inline=True)


def _commands(code: str, line: int, inline: bool = False) -> Iterator[Command | tuple[int, str]]:
    try:
        yield from (Command(line, tuple(words), inline) for words in split(code))
    except Wrong as error:
        yield line, str(error)


# ---------------------------------------------------------------------- the command line of subquad


def arguments(words: Sequence[str]) -> list[str] | None:
    """The arguments that a command gives to subquad; None where it is another program's."""
    if words[0].rpartition("/")[2] == "subquad":
        return list(words[1:])
    for i in range(1, len(words) - 1):
        if words[i] == "-m" and words[i + 1] == "subquad":
            return list(words[i + 2 :])
    return None


def check(given: Sequence[str], inline: bool = False) -> None:
    """Parse what subquad is given, as far as that is possible without the files that it names.

    Raises:
        Wrong: an unknown command, option, setting or method, or a value that does not fit.
    """
    words = [PLACEHOLDERS.get(word, word) if inline else word for word in given if word not in ("…", "...")]
    group = _group()
    try:
        context = group.context_class(group, info_name="subquad")
        _, rest, _ = group.make_parser(context).parse_args(list(words))
        if not rest or rest[0] == "COMMAND":
            return
        name, command, rest = group.resolve_command(context, rest)
        if "--help" in rest or "-h" in rest or command is None:
            return
        asked = command.make_context(name, list(rest), parent=context).params
    except CommandError as error:
        if inline and "requires an argument" in error.format_message():
            return  # the option is named, and exists
        raise Wrong(error.format_message()) from None
    except SystemExit as error:
        raise Wrong(str(error)) from None
    if asked.get("import_"):  # methods of a module that only the reader has
        return
    try:
        with as_input_error():
            CHECKS.get(str(name), _check_settings)(str(name), asked)
    except InputError as error:
        raise Wrong(str(error)) from None


@cache
def _group() -> Any:
    return typer.main.get_command(app)


def _check_settings(name: str, asked: Mapping[str, Any]) -> None:
    """Options that are fields of settings, and the methods among them."""
    settings: Any = from_arguments(settings_class(name), asked, {})
    methods = getattr(settings, "methods", ()) or ()
    for method in (*methods, *filter(None, [getattr(settings, "method", None)])):
        parse_method(method.replace("{buckets}", "4"))


def _check_training(name: str, asked: Mapping[str, Any]) -> None:
    """The task, its settings and what is searched."""
    from subquad.research.training.settings import settings_of
    from subquad.research.training.task_arguments import tables_of
    from subquad.research.tuning.run import Tuning
    from subquad.research.tuning.run import check as check_tuning
    from subquad.research.tuning.search import Base

    task, tables = tables_of(asked["task"] or "text", None, asked["override"], method=asked["method"])
    settings = settings_of(str(task), *tables)
    methods = settings.model.method
    for method in [methods] if isinstance(methods, str) else methods:
        parse_method(method)
    if name == "tune" and asked["search"]:
        base = Base(str(task), tuple(tables))
        check_tuning(Tuning(base, tuple(asked["search"]), asked["out"], asked["trials"], asked["prune"], asked["seed"]))


def _check_experiment(name: str, asked: Mapping[str, Any]) -> None:
    """The experiment, its scale, and settings of the scale."""
    from subquad.research.papers.catalogue import load
    from subquad.research.papers.overrides import changed, read_changes

    if asked["experiment"] is not None:
        scales = load(asked["experiment"]).scales
        if asked["scale"] not in scales:
            raise InputError(f"no scale {asked['scale']!r}")
        changed(scales[asked["scale"]], read_changes(asked["override"] or ()))


def _check_method(name: str, asked: Mapping[str, Any]) -> None:
    if asked["name"] is not None:
        parse_method(asked["name"])


CHECKS = {
    "train": _check_training,
    "tune": _check_training,
    "reproduce": _check_experiment,
    "methods": _check_method,
    "report": lambda name, asked: None,
}
