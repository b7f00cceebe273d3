"""`subquad compare`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from subquad.cli.common import divided, needs, progress_bar, say, user_errors, working_in
from subquad.cli.options import Adapters, AsJson, Column, DataDir, Device, Methods, Model, Text

if TYPE_CHECKING:
    from subquad.report.schema import Report
    from subquad.workflows.compare import Settings


def compare(
    model: Model = None,
    text: Text = None,
    column: Column = "text",
    task: Annotated[
        str | None, typer.Option(help="A labelled task too: banking77, movie-reviews, sts or retrieval.")
    ] = None,
    data_dir: DataDir = None,
    examples: Annotated[
        int | None, typer.Option(help="Use so many of the task's examples, drawn by lot; default: all.")
    ] = None,
    methods: Methods = None,
    adapter: Adapters = None,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            help="Fit learned parameters on this text first; it must not be the text compared on. Repeatable."
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="The model's own length in tokens; default: its positions, at most 512.")
    ] = None,
    min_fidelity: Annotated[
        float, typer.Option(help="Recommend nothing below this mean cosine (or ratio of perplexities) to exact.")
    ] = 0.99,
    device: Device = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the report; interrupted runs resume from it.")] = Path(
        "subquad-compare"
    ),
    as_json: AsJson = False,
) -> None:
    """Which attention can go into this model, what does that lose, what does it gain?"""
    with user_errors(), needs("demo"):
        from subquad.workflows.compare import DEFAULT_METHODS, LEARNED_METHODS, Settings

        own = DEFAULT_METHODS + (LEARNED_METHODS if calibrate else ())
        settings = Settings(
            model=model,
            text=tuple(text or ()),
            column=column,
            task=task,
            data_dir=data_dir,
            examples=examples,
            methods=own if methods is None else divided(methods),
            max_length=max_length,
            min_fidelity=min_fidelity,
            device=device,
            adapters=tuple(adapter or ()),
            calibrate=tuple(calibrate or ()),
        )
        report, paths = _compared(settings, out)
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from subquad.report.tables import rich_table

    console = Console()
    console.print(rich_table(report))
    say(f"Report: {next(path for path in paths if path.suffix == '.html')}", console)


def _compared(settings: "Settings", out: Path) -> "tuple[Report, list[Path]]":
    """Measure and write the files."""
    from subquad.report.write import write_report
    from subquad.workflows.compare import measure
    from subquad.workflows.compare_report import report_of
    from subquad.workflows.store import Store

    with working_in(out):
        with progress_bar() as progress:
            report = report_of(measure(settings, out, progress))
        paths = write_report(report, out)
        Store.clear(out)
    return report, paths
