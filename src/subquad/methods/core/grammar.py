"""The text form of methods: a name with settings, and several such terms with `+` between them.

    text   = name | name:setting=value,setting=value,… | term + term + …
    term   = text without a `+`, its settings also separated by `;` | ( text )

`+` between methods adds them (`sum`); inside the settings of `mixed-heads` and `by-length` it divides the heads or the
lengths, where each term begins with its share (`3*`) or with its first length (`700:` or `measured:`).
"""

import re
from collections.abc import Iterable

A_METHOD = r"[A-Za-z(]"  # how a term begins; and not the plus of a number, as in 1e+20
A_SHARE = rf"(?:\d+\s*\*\s*)?{A_METHOD}"
MISSING = "a method is missing next to a '+', which separates two methods"
MEASURED = "measured"  # in place of a length: the crossover that was measured on this machine
A_LENGTH = rf"(?:\d+|{MEASURED})\s*:"


def terms(text: str, begin: str = A_METHOD) -> list[str]:
    """The terms of a text, divided at each `+` outside of parentheses before what a term may `begin` with.

    >>> terms("local:window=32+keep:first")
    ['local:window=32', 'keep:first']
    >>> terms("3*(local+keep)+lha", A_SHARE)
    ['3*(local+keep)', 'lha']
    """
    parts: list[str] = []
    for piece in re.split(rf"\+(?=\s*{begin})", text):  # no iterator of matches, which torch.compile cannot trace
        if parts and parts[-1].count("(") > parts[-1].count(")"):
            parts[-1] += f"+{piece}"
        else:
            parts.append(piece)
    return [term.strip() for term in parts]


def settings(text: str) -> list[str]:
    """The settings of a method, separated by `,` or, inside other texts, by `;`."""
    return [part.strip() for part in re.split("[,;]", text) if part]


def bare(text: str) -> str:
    """A text without the parentheses that enclose all of it.

    >>> bare("(local+keep)"), bare("(local)+(keep)")
    ('local+keep', '(local)+(keep)')
    """
    text = text.strip()
    while text.startswith("(") and text.endswith(")") and all(_depth(text[:end]) > 0 for end in range(1, len(text))):
        text = text[1:-1].strip()
    return text


def as_term(method: object) -> str:
    """The text of a method as a term of another text."""
    text = str(method).replace(",", ";")
    return f"({text})" if len(terms(text)) > 1 else text


def joined(texts: Iterable[str]) -> str:
    """One text of several terms."""
    return "+".join(texts)


def _depth(text: str) -> int:
    return text.count("(") - text.count(")")
