"""Doctests in docstrings as code blocks: Markdown would read their `>>>` as quotations. An extension of Griffe."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^>>> .*\n?(?:^.+\n?)*", re.MULTILINE)  # up to an empty line
DIRECTIVE = re.compile(r" *# doctest: .*$", re.MULTILINE)


def fenced(text: str) -> str:
    """Text with each doctest in a fence, less the directives for the doctest runner."""
    return DOCTEST.sub(lambda found: f"```pycon\n{DIRECTIVE.sub('', found[0]).rstrip()}\n```\n", text)


class Docstrings(griffe.Extension):
    """Fences the doctests of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence an object's doctests; Griffe calls this for every module, class, function and attribute it has read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
