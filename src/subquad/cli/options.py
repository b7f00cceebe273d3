"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Argument(help="Hub id or folder; default: the encoder of the demo extra.")]
Text = Annotated[
    list[Path] | None,
    typer.Option(help="Text to read: file, folder, .jsonl, .csv; repeatable. Default: Python's own documentation."),
]
Column = Annotated[str, typer.Option(help="The column of .jsonl, .csv and .tsv files that holds the text.")]
Methods = Annotated[
    list[str] | None,
    typer.Option(help='Methods as "name:setting=value,…"; repeatable, or several divided by spaces.'),
]
Adapters = Annotated[
    list[Path] | None,
    typer.Option(help="An adapter that subquad calibrate wrote, as a row of its own; repeatable."),
]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")]
DataDir = Annotated[
    Path | None, typer.Option(envvar="SUBQUAD_DATA", help="The folder of real data; each task's is a folder in it.")
]
