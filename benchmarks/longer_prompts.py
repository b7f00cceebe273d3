"""The quality of a decoder itself on prompts past its own positions: perplexity by quarters of a text, exact attention.

    as it is       the model's own rotary frequencies, past the positions that it was trained on
    extended       YaRN's, by `sq.hf.extend_positions`, without training

Attention is exact, by subquad's kernel in bf16. The model is the demo decoder, the text the first tokens of a novel.
"""

from pathlib import Path
from typing import Annotated

import sheet
import typer

from subquad.tools.models import demo
from subquad.tools.models.next_tokens import QUARTERS, quarter_perplexities
from subquad.tools.models.pretrained import Pretrained, load, running

NOVEL = "gutenberg/Great-Expectations_1400.txt"
HEAD = ["tokens", "positions", *(f"quarter {number + 1}" for number in range(QUARTERS))]
ABOUT = """\
Perplexity of {name} in the quarters of the first tokens of *{novel}*, every position counted, exact attention \
(`full:kernel=subquad`) in bf16. The model has {limit:,} positions of its own."""


def measure(model: Pretrained, tokens: list[int]) -> list[float]:
    """The perplexity of each quarter of a text."""
    with running(model.model, "full:kernel=subquad"):
        return quarter_perplexities([model.quarters([tokens], model.prefill([tokens]))])


def main(
    folder: Annotated[Path, typer.Argument()] = sheet.DATA, lengths: tuple[int, ...] = (16384,), out: Path | None = None
) -> None:
    """Measure, and print or write the table."""
    model, rows = load(demo.DECODER, dtype="bf16"), []
    text = model.content_ids((folder / NOVEL).read_text("utf-8", errors="replace"))
    for length in lengths:
        tokens = model.wrap(text, length)
        own = measure(model, tokens)
        extended = measure(model.extended_to(length).reaching(length), tokens)
        for positions, quarters in (("as it is", own), ("extended", extended)):
            rows.append([f"{length:,}", positions, *(f"{each:.2f}" for each in quarters)])
    about = ABOUT.format(name=model.name, novel="Great Expectations", limit=model.limit or 0)
    sheet.publish("Prompts past a decoder's own positions", [about, sheet.table(HEAD, rows)], out, "bf16")


if __name__ == "__main__":
    sheet.run(main)
