"""Names in sentences: lists of them, and messages about unknown ones."""

import difflib
from collections.abc import Iterable, Sequence

FEW = 5  # names that a message may list


def listed(words: Sequence[str]) -> str:
    """Returns words as a sentence lists them.

    >>> listed(["512", "1,024", "2,048"])
    '512, 1,024 and 2,048'
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def nearest(word: str, known: Iterable[str], similar: float = 0.5) -> str:
    """Returns a hint at the known word that is spelled most like `word`, or an empty text where none is close.

    `similar` is the least similarity, from 0 to 1 (`difflib.SequenceMatcher.ratio`).

    >>> nearest("clusterd", ["full", "clustered"])
    "; did you mean 'clustered'?"
    """
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=similar)
    return f"; did you mean {match[0]!r}?" if match else ""


def instead(word: str, known: Iterable[str], where: str, have: str = "there are") -> str:
    """Returns the end of a message about an unknown name: the nearest known name, and all of them or where they are.

    Up to five names are listed. `where` is the beginning of a sentence about where all are listed, such as
    "`subquad methods` lists"; without it, the first five are named.

    >>> f"no pass 'forwards'{instead('forwards', ['forward', 'backward'], '')}"
    "no pass 'forwards'; did you mean 'forward'? There are forward, backward"
    >>> f"no task 'x'{instead('x', 'abcdef', '`subquad train` lists')}"
    "no task 'x'; `subquad train` lists all 6"
    """
    names = list(known)
    known_names = f"{have} {_few(names)}" if len(names) <= FEW or not where else f"{where} all {len(names)}"
    hint = nearest(word, names)
    return f"{hint} {known_names[0].upper()}{known_names[1:]}" if hint else f"; {known_names}"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return f"{', '.join(names[:FEW]) or 'none'}{more}"
