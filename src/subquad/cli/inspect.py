"""`subquad inspect`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from subquad.cli.common import check_folder, divided, progress_bar, user_errors, writing


def inspect(
    model: Annotated[
        str | None, typer.Argument(help="Hub id or folder; default: the encoder of the demo extra.")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text to read: file, folder, .jsonl, .csv; repeatable. Default: Python's own documentation."),
    ] = None,
    column: Annotated[
        str, typer.Option(help="The column of .jsonl, .csv and .tsv files that holds the text.")
    ] = "text",
    methods: Annotated[
        list[str] | None,
        typer.Option(help='Methods as "name:setting=value,…"; repeatable, or several divided by spaces.'),
    ] = None,
    adapter: Annotated[
        list[Path] | None,
        typer.Option(help="A folder of learned parameters that were fitted to this model; repeatable."),
    ] = None,
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
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the results; interrupted runs resume from it.")] = Path(
        "subquad-inspect"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON and nothing else.")] = False,
) -> None:
    """Which keys do methods choose in this model, and how much of exact attention do those hold?"""
    from subquad.workflows.errors import InputError

    with user_errors():
        try:
            from subquad.report.inspect_tables import rich_table
            from subquad.report.inspect_write import write_inspection
            from subquad.workflows.inspect import DEFAULT_METHODS, Settings, measure
            from subquad.workflows.inspect_report import report_of
            from subquad.workflows.store import Store
        except ImportError as error:
            raise InputError(f"{error.name} is not installed: pip install 'subquad[demo]'") from None
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
            device=device,
        )
        check_folder(out)
        with progress_bar() as progress:
            report = report_of(measure(settings, out, progress), settings)
        with writing(out):
            paths = write_inspection(report, out)
        Store.clear(out)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    console = Console()
    console.print(rich_table(report))
    console.print(f"Results: {', '.join(map(str, paths))}", soft_wrap=True)
