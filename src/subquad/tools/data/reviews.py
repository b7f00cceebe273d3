"""Movie reviews (Pang and Lee 2004) as in NLTK's archive: pos/cv000_….txt to neg/cv999_….txt."""

import re
from dataclasses import dataclass
from pathlib import Path

from subquad.core.errors import InputError
from subquad.tools.data.documents import read_archive

_NAME = re.compile(r"(?:.*/)?(pos|neg)/cv(\d{3})_[^/]*\.txt")


@dataclass(frozen=True)
class Review:
    """One review: its number in the archive (0 to 999 in each class), "pos" or "neg", its text."""

    number: int
    label: str
    text: str


def read_reviews(archive: Path) -> list[Review]:
    """All reviews, in the order of their files' names; InputError where the archive has not both classes."""
    texts = read_archive(archive)
    matches = [match for name in texts if (match := _NAME.fullmatch(name))]
    if {match[1] for match in matches} != {"pos", "neg"}:
        raise InputError(f"{archive} does not contain the movie reviews (pos/cv….txt, neg/cv….txt)")
    return [Review(int(match[2]), match[1], texts[match[0]]) for match in matches]
