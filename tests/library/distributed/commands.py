"""Commands on a few ranks: what each rank says and how it ends.

torchrun --standalone --nproc-per-node 2 -m tests.library.distributed.commands FOLDER INPUTS

INPUTS holds models of `tests.tools.workflows.tiny` and a folder `text`; reports are written below FOLDER.
"""

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from subquad.core.errors import InputError
from subquad.tools.cli.main import app
from subquad.tools.compare import run as compare
from subquad.tools.plan import loads
from tests.tools.workflows import tiny
from tests.tools.workflows.planning.steady import make_steady

MODELS = "bert", "gpt2"
COMPARED = [
    "compare",
    "bert",
    "--methods",
    "clustered:clusters=4 lsh linformer",
    "--max-length",
    "30",
    "--dtype",
    "fp32",
]
CAUSAL = ["compare", "gpt2", "--methods", "linear", "--max-length", "30", "--dtype", "fp32"]
PLANNED = [
    "plan",
    "bert",
    "--methods",
    "local:window=2 clustered:clusters=8",
    "--lengths",
    "24",
    "--min-fidelity",
    "0.8",
    "--minutes",
    "2",
]


def make_inputs(folder: Path) -> None:
    """Write the models and the text."""
    for name in MODELS:
        tiny.save(name, folder / name)
    (folder / "text").mkdir()
    for number, document in enumerate(tiny.documents(count=3, sentences=20)):
        (folder / "text" / f"{number}.txt").write_text(document)


def run(inputs: Path, command: str, model: str, *words: str) -> dict[str, Any]:
    """A command on few passages; plans have times that do not depend on the machine."""
    prepare = compare.prepare
    with (
        mock.patch.object(compare, "prepare", lambda s, *rest: prepare(replace(s, passages=5), *rest)),
        mock.patch.object(compare.Comparison, "sequence_count", return_value=2),
        mock.patch.object(loads, "HELD_OUT", 3),
        mock.patch.object(loads, "MOST", 2),
        ExitStack() as steady,
    ):
        make_steady(partial(measured_in_vain, steady))
        given = [command, str(inputs / model), "--text", str(inputs / "text"), *words]
        done = CliRunner().invoke(app, given)
    return {"code": done.exit_code, "out": done.stdout, "err": done.stderr, "error": repr(done.exception)}


def measured_in_vain(patches: ExitStack, where: Any, name: str, value: Any) -> None:
    """Put a value in the place of what is measured, or a function that measures first, as ranks do it together."""
    valid = getattr(where, name)

    def both(*given: Any, **options: Any) -> Any:
        if name != "turn":  # which measures by itself
            valid(*given, **options)
        return value(*given, **options)

    patches.enter_context(mock.patch.object(where, name, both if callable(value) else value))


def failing(self: compare.Comparison, length: int) -> Any:
    raise InputError("no room for the hidden states")


def main(folder: Path, inputs: Path) -> None:
    rank, found = os.environ["RANK"], {}
    for name, words in {"compare": COMPARED, "causal": CAUSAL, "plan": PLANNED}.items():
        found[name] = run(inputs, *words, "--out", str(folder / name))
    found["again"] = run(inputs, *COMPARED, "--min-fidelity", "0.5", "--out", str(folder / "compare"))
    with mock.patch.object(compare.Comparison, "op", failing) if rank == "1" else nullcontext():
        found["cut off"] = run(inputs, *COMPARED, "--out", str(folder / "resumed"))
    found["resumed"] = run(inputs, *COMPARED, "--out", str(folder / "resumed"))
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
