"""Rules for the growth of the buckets, keys and cells of `lha-tail` with the length.

    python benchmarks/hash_growth.py [--data FOLDER] [--lengths "512 1024"] [--steps 60] [--methods …] [--out FILE.md]

FOLDER holds gutenberg/; the default is the environment variable SUBQUAD_DATA. Each method is fitted to the demo encoder
(the `demo` extra) at each length, on two novels.
"""

import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import sheet

from subquad import hf
from subquad.methods import parse_method
from subquad.tools.calibrate.run import fit, mean_at
from subquad.tools.calibrate.settings import CalibrateSettings
from subquad.tools.data.texts import read_documents
from subquad.tools.models.pretrained import load

METHODS = (
    "lha-tail:buckets=16", "lha-tail:buckets=32", "lha-tail:buckets=64", "lha-tail:buckets=128",
    "lha-tail:keys=160", "lha-tail:keys=192,cells=64",
)  # fmt: skip
ABOUT = """\
The relative error ‖out − exact‖ / ‖exact‖ of the attention outputs on passages that were left out of the fit, mean of \
the layers of the demo encoder, after {steps} steps of `subquad calibrate` at each length. Unless the row says \
otherwise, `lha-tail` has {buckets} buckets, {keys} keys and {cells} cells. Beyond 512 tokens, positions are \
interpolated."""


def error(method: str, length: int, text: Path, steps: int) -> float:
    """The mean error of the layers after the fit."""
    own = load(None)
    longer = hf.extend_positions(copy.deepcopy(own.model), length)
    model = replace(own, model=longer, limit=max(length, own.limit or 0))
    settings = CalibrateSettings(method=method, text=(text,), steps=steps, max_length=length)
    with tempfile.TemporaryDirectory() as folder:
        fitted = fit(settings, parse_method(method), model, read_documents([text]), Path(folder), lambda *_: None)
    return mean_at(fitted.record["history"][-1], "error")


def main(
    lengths: tuple[int, ...] = (512, 1024),
    data: Path = sheet.DATA_OR_LOCAL,
    steps: int = 60,
    methods: tuple[str, ...] = METHODS,
    out: Path | None = None,
) -> None:
    text, default = data / "gutenberg", parse_method("lha-tail")
    rows = [[f"`{method}`", *(f"{error(method, length, text, steps):.3f}" for length in lengths)] for method in methods]
    about = ABOUT.format(steps=steps, buckets=default.buckets, keys=default.keys, cells=default.cells)
    head = ["method", *(f"{length:,} tokens" for length in lengths)]
    sheet.publish("Sizes of lha-tail at longer inputs", [about, sheet.table(head, rows)], out)


if __name__ == "__main__":
    sheet.run(main)
