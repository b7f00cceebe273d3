"""Labelled texts of the user's own: tables with a column of texts and one of labels."""

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from subquad.core.errors import InputError
from subquad.tools.data.texts import TABLES, field_of, read_rows

Labelled = list[tuple[str, str]]  # (text, label)


def read_labelled(paths: Sequence[Path], text: str = "text", label: str = "label") -> Labelled:
    """The rows of .csv, .tsv and .jsonl files, in their order; labels are any strings.

    Raises:
        InputError: a file that is missing, no such table, or has no rows; a row without a text or a label; named.
    """
    rows: Labelled = []
    for path in paths:
        if path.suffix.lower() not in TABLES:
            raise InputError(f"{path} is not a table of labelled texts: give {', '.join(TABLES)}")
        entries = [(number, field_of(path, number, row, text), row) for number, row in read_rows(path)]
        if not entries:
            raise InputError(f"{path} has a header, but no rows")
        for number, content, row in entries:
            name = field_of(path, number, row, label).strip()
            if not content.strip() or not name:
                raise InputError(f"{path}, line {number}: no {label if content.strip() else text} in it")
            rows.append((content, name))
    return rows


def hold_out(rows: Labelled, share: float, seed: int) -> tuple[Labelled, Labelled]:
    """Rows to learn from and rows held out, each label's rows in the same share, drawn by the seed; order is kept.

    Of a label with one row, that row stays to learn from.
    """
    indices = defaultdict(list)
    for index, (_, name) in enumerate(rows):
        indices[name].append(index)
    draw = random.Random(seed)
    held: set[int] = set()
    for of_label in indices.values():
        held |= set(draw.sample(of_label, min(len(of_label) - 1, max(1, round(share * len(of_label))))))
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]
