"""Completion in shells: names of methods and their settings, and names of experiments."""

import os
import shlex
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

BREAKS = (":", "=")  # where bash breaks a word, of which it then completes the last part alone


def method_texts(incomplete: str) -> list[str]:
    """Methods as in options: names, and after "name:" the settings that are not given yet."""
    *before, last = incomplete.split(" ")  # several methods in one word, separated by spaces
    ahead = " ".join([*before, ""])
    return [f"{ahead}{text}" for text in (_with_settings(last) if ":" in last else _names(last))]


def _names(begun: str) -> list[str]:
    from subquad.methods import list_methods

    with warnings.catch_warnings(action="ignore"):  # a warning would be printed into the line that is completed
        return [name for name in list_methods() if name.startswith(begun)]


def _with_settings(text: str) -> list[str]:
    """The text with each setting that it does not have, up to the "="."""
    from subquad.methods.core.plugins import find_method

    name, _, settings = text.partition(":")
    *complete, last = settings.split(",")
    method = find_method(name)
    if method is None or "=" in last:
        return []
    taken = {setting.partition("=")[0] for setting in complete}
    ahead = text[: len(text) - len(last)]
    return [f"{ahead}{known}=" for known in method.defaults() if known.startswith(last) and known not in taken]


# ---------------------------------------------------------------------- bash


@contextmanager
def whole_words() -> Iterator[None]:
    """In the block, a word that bash broke is completed as a whole, and printed from the last break on.

    Bash breaks words at ":" and "=", and wants completions of the last part alone. Other shells have whole words.
    """
    if os.environ.get("_SUBQUAD_COMPLETE") != "complete_bash":
        yield
        return
    words, at = _words(os.environ.get("COMP_WORDS", "")), int(os.environ.get("COMP_CWORD", "0"))
    words += [""] * (at + 1 - len(words))
    begin = at
    while begin > 1 and (words[begin] in BREAKS or words[begin - 1] in BREAKS):
        begin -= 1
    ahead = "".join(words[begin : at + (words[at] in BREAKS)])
    os.environ["COMP_WORDS"] = shlex.join([*words[:begin], "".join(words[begin : at + 1])])
    os.environ["COMP_CWORD"] = str(begin)
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            print(_after(ahead, line))


def _after(ahead: str, line: str) -> str:
    """The line without the text before the break: the end of `ahead`, of which an option's name is the beginning."""
    return next((line[len(ahead) - i :] for i in range(len(ahead)) if line.startswith(ahead[i:])), line)


def _words(line: str) -> list[str]:
    """The words of a line whose last quotation may be open."""
    for closing in ("", "'", '"'):
        try:
            return shlex.split(line + closing)
        except ValueError:
            continue
    return line.split()
