"""Movie reviews (Pang and Lee 2004) as NLTK's archive holds them: pos/cv000_….txt to neg/cv999_….txt."""

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from subquad.errors import InputError

_NAME = re.compile(r"(?:.*/)?(pos|neg)/cv(\d{3})_[^/]*\.txt")


@dataclass(frozen=True)
class Review:
    """One review: its number in the archive (0 to 999 in each class), "pos" or "neg", its text."""

    number: int
    label: str
    text: str


def read_reviews(archive: Path) -> list[Review]:
    """All reviews, in the order of their files' names.

    Raises:
        InputError: no archive, or one without reviews of both classes.
    """
    try:
        with zipfile.ZipFile(archive) as files:
            matches = [match for name in sorted(files.namelist()) if (match := _NAME.fullmatch(name))]
            texts = [files.read(match[0]).decode("utf-8", errors="replace") for match in matches]
    except FileNotFoundError:
        raise InputError(f"no archive at {archive}") from None
    except zipfile.BadZipFile:
        raise InputError(f"{archive} is not a zip archive") from None
    if {match[1] for match in matches} != {"pos", "neg"}:
        raise InputError(f"{archive} does not hold the movie reviews (pos/cv….txt, neg/cv….txt)")
    return [Review(int(match[2]), match[1], text) for match, text in zip(matches, texts, strict=True)]
