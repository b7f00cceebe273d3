"""`subquad inspect`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from subquad.cli.common import divided, needs, progress_bar, say, user_errors, working_in
from subquad.cli.options import Adapters, AsJson, Column, Device, Methods, Model, Text


def inspect(
    model: Model = None,
    text: Text = None,
    column: Column = "text",
    methods: Methods = None,
    adapter: Adapters = None,
    buckets: Annotated[int, typer.Option(help="B: of the upper bound at N/B keys, and of the default methods.")] = 4,
    length: Annotated[
        int | None, typer.Option(help="N, tokens of a sequence; default: the model's positions, at most 512.")
    ] = None,
    sequences: Annotated[int, typer.Option(help="How many sequences, spread over the text.")] = 4,
    layer: Annotated[
        int | None, typer.Option(help="Of the attention maps and of the plot of bucket sizes; default: in the middle.")
    ] = None,
    head: Annotated[int, typer.Option(help="Of the attention maps.")] = 0,
    tokens: Annotated[int, typer.Option(help="How many tokens the attention maps show, from the first on.")] = 40,
    spectrum: Annotated[
        bool, typer.Option("--spectrum", help="Also the singular values of exact attention's weights: their low rank.")
    ] = False,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-inspect"
    ),
    as_json: AsJson = False,
) -> None:
    """Which keys do methods choose in this model, and how much of exact attention do those hold?"""
    with user_errors(), needs("demo"):
        from subquad.report.inspect_tables import rich_table
        from subquad.report.inspect_write import write_inspection
        from subquad.workflows.inspect import DEFAULT_METHODS, Settings, measure
        from subquad.workflows.inspect_report import report_of
        from subquad.workflows.store import Store

        settings = Settings(
            model=model,
            text=tuple(text or ()),
            column=column,
            methods=DEFAULT_METHODS if methods is None else divided(methods),
            adapters=tuple(adapter or ()),
            buckets=buckets,
            length=length,
            sequences=sequences,
            layer=layer,
            head=head,
            tokens=tokens,
            spectrum=spectrum,
            device=device,
        )
        with working_in(out):
            with progress_bar() as progress:
                report = report_of(measure(settings, out, progress), settings)
            paths = write_inspection(report, out)
            Store.clear(out)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = Console()
    console.print(rich_table(report))
    say(f"Results: {', '.join(map(str, paths))}", console)
